//! Notes and limitations of lightning-Habana's documents, as far as no other test shows what became of them. The table is in
//! docs/lightning_habana.md.

use crate::class_paths::problem;

#[test]
fn what_is_not_there_yet_is_refused_by_name() {
    let profilers = "there is no profiler `#`; use simple, advanced, pytorch or hpu";
    let classes = "is not a known class; ";
    for (option, expected) in [
        ("plugins=HPUDeepSpeedPrecisionPlugin", "without a DeepSpeed strategy"),
        ("plugins=DeepSpeedPrecisionPlugin", "without a DeepSpeed strategy"),
        ("profiler=xla", profilers),
        ("profiler={class_path: lightning.pytorch.profilers.XLAProfiler}", classes),
        (
            "precision=fp7",
            "`Trainer(accelerator='hpu', precision='fp7')` is not supported; use one of 32-true",
        ),
    ] {
        let found = problem("trainer: {accelerator: hpu}", &[&format!("trainer.{option}")]);
        let name = option.rsplit(['=', '.']).next().unwrap_or_default().trim_end_matches(['}', ' ']);
        assert!(found.contains(&expected.replace('#', name)), "{option}: {found}");
    }
    for argument in ["replace_layers=true", "recipe=DelayedScaling", "min_weights=5"] {
        let options =
            ["trainer.plugins=HPUPrecisionPlugin".to_owned(), format!("trainer.plugins.{argument}")];
        let found = problem("trainer: {accelerator: hpu}", &options.each_ref().map(String::as_str));
        let key = argument.split('=').next().unwrap_or_default();
        let expected = format!("{key}: is for float8, and the precision is another one; set precision: fp8");
        assert!(found.contains(&expected), "{argument}: {found}");
    }
}

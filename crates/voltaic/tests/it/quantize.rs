//! `voltaic quantize`, and what reads its files.

use std::path::Path;

use crate::generation::{MODEL, trained, voltaic};

const TEXT: &str = "the cat sat on the mat and the dog sat on the log. ";

fn run(folder: &Path, arguments: &[&str]) -> (String, String) {
    let (is_ok, text, errors) = voltaic(folder, arguments);
    assert!(is_ok, "{arguments:?}: {errors}");
    (text, errors)
}

#[test]
fn a_quantized_gpt_validates_and_generates() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let checkpoint = trained(folder, TEXT);
    let model: Vec<&str> = MODEL.split_whitespace().collect();

    // the configuration beside the checkpoint is used
    let quantize = ["quantize", &checkpoint, "--stage=validate", "--output=small.safetensors"];
    let (text, errors) = run(folder, &[&quantize[..], &["--trainer.enable_progress_bar=false"]].concat());
    let rows: Vec<&str> = text.lines().filter(|line| line.contains(" KvCacheLayer ")).collect();
    assert!(rows.len() == 4 && rows[1].starts_with("transformer.h.0.attn.v_cache"), "{text}");
    let rows: Vec<&str> = text.lines().filter(|line| line.contains(" Linear ")).collect();
    assert!(rows.len() == 8 && rows[0].starts_with("transformer.h.0.attn.c_attn"), "{text}");
    assert!(rows.iter().all(|row| row.matches(" %").count() == 4 && row.contains("0.000 %")), "{text}");
    assert!(errors.contains("lm_head") || !text.contains("lm_head"), "{errors}");
    assert!(text.contains("before metric") && text.contains("quantized metric"), "{text}");
    let losses: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("val_loss")).map(str::trim).collect();
    let [before, after] = losses[..] else { panic!("{text}") };
    let [loss, quantized] = [before, after].map(|loss| loss.parse::<f64>().unwrap());
    assert!(loss != quantized && (loss - quantized).abs() < 0.05 * loss, "{text}");
    for name in ["small.safetensors", "small.png", "inc_output/measure_hooks_maxabs.json"] {
        assert!(folder.join(name).is_file(), "{name}");
    }
    let small = "--ckpt_path=small.safetensors";
    for more in [&[][..], &["--trainer.accelerator=hpu"], &["--trainer.devices=2", "--trainer.strategy=ddp"]]
    {
        let (text, _) = run(folder, &[&["validate", small], &model[..], more].concat());
        let found = text.lines().find_map(|line| line.strip_prefix("val_loss")).unwrap().trim();
        let found: f64 = found.parse().unwrap();
        assert!((found - quantized).abs() < 1e-6 * quantized, "{more:?}: {found} {quantized}");
    }
    let prompt = ["--prompt=the cat", "--temperature=0.5", "--seed=3", "--max_new_tokens=30"];
    let generate = |more: &[&str]| run(folder, &[&["generate", small], &model[..], &prompt, more].concat()).0;
    let text = generate(&[]);
    assert!(text.starts_with("the cat") && text.chars().count() == 38, "{text:?}");
    for more in [&["--graph"][..], &["--trainer.accelerator=hpu", "--graph"]] {
        assert_eq!(generate(more), text, "{more:?}");
    }

    // a cache in float8 beside weights that are not: the most likely text begins with the same letters, in a quarter of the memory
    let quant = r#"{"allowlist": {"types": ["KVCache"]}}"#;
    std::fs::write(folder.join("cache.json"), quant).unwrap();
    let cache = ["--quant=cache.json", "--output=cache.safetensors", "--trainer.enable_progress_bar=false"];
    run(folder, &[&["quantize", &checkpoint, "--stage=validate"][..], &cache].concat());
    let likely = |ckpt_path: &str| {
        let greedy = ["--prompt=the cat", "--prompt=and the dog ", "--temperature=0", "--max_new_tokens=60"];
        let (text, errors) = run(folder, &[&["generate", ckpt_path][..], &model, &greedy].concat());
        let bytes = errors.split("keys and values take ").nth(1).and_then(|rest| rest.split(' ').next());
        (text, bytes.unwrap().parse::<usize>().unwrap())
    };
    let ((text, bytes), (quantized, few)) = (likely(&checkpoint), likely("--ckpt_path=cache.safetensors"));
    assert_eq!(few * 4, bytes);
    for (text, quantized) in text.lines().zip(quantized.lines()) {
        let same = text.chars().zip(quantized.chars()).take_while(|(a, b)| a == b).count();
        assert!(same >= "and the dog ".len() + 6, "{text:?} {quantized:?}");
    }
    refused(folder, &model, &checkpoint);
}

/// What remains to be said of files of such weights, and of lists that leave none.
fn refused(folder: &Path, model: &[&str], checkpoint: &str) {
    std::fs::write(folder.join("none.json"), r#"{"blocklist": {"types": ["Linear", "KVCache"]}}"#).unwrap();
    let quantize = ["quantize", checkpoint, "--stage=validate", "--quant=none.json"];
    let fit = [&["fit", "--weights=small.safetensors"][..], model].concat();
    for (arguments, expected) in [
        (
            &quantize[..],
            "blocklist: leaves no layer of Gpt to be quantized: it has 13, such as transformer.h.0",
        ),
        (
            &fit,
            "weights (from command line): small.safetensors is quantized (float8 weights with scales); validate",
        ),
    ] {
        let (is_ok, _, errors) = voltaic(folder, arguments);
        assert!(!is_ok && errors.contains(expected), "{arguments:?}: {errors}");
    }
}

#[test]
fn what_quantize_cannot_do_is_named() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("bad.json"), r#"{"scale_methods": "maxabs_hw"}"#).unwrap();
    let given = ["quantize", "--model=LeNet", "--data=MnistData"];
    for (more, expected) in [
        (&[][..], "ckpt_path: not set, so that the weights would be random"),
        (&["--ckpt_path=none.ckpt", "--scale_method=maxabs_h"], "the words are unit_scale, "),
        (&["--ckpt_path=none.ckpt", "--quant=bad.json"], "did you mean scale_method"),
        (&["--ckpt_path=none.ckpt", "--quant=none.json"], "none.json"),
        (&["--ckpt_path=none.ckpt", "--stage=fit"], "possible values: predict, validate, test"),
    ] {
        let (is_ok, _, errors) = voltaic(folder.path(), &[&given[..], more].concat());
        assert!(!is_ok && errors.contains(expected), "{more:?}: {errors}");
    }
}

//! `voltaic graph show`: what a compiled training step consists of.

use std::collections::BTreeSet;
use std::path::Path;

use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::graph::ShownGraph;
use voltaic::nn::{Forward, Linear, ModuleExt};
use voltaic::optim::Sgd;
use voltaic::{Kind, Module, Tensor};

use crate::generation::voltaic;
use crate::probe::{own_process, plays, silent, text_of};
use crate::rng::seeded;

fn show(folder: &Path, arguments: &[&str]) -> (String, String) {
    let (is_ok, text, errors) = voltaic(folder, &[&["graph", "show"], arguments].concat());
    assert!(is_ok, "{arguments:?}: {errors}");
    (text, errors)
}

/// Operators of each graph as the log of captures says: all, and those that are replayed.
fn captured(log: &str) -> Vec<(usize, usize)> {
    let numbers = |line: &str| {
        let (all, rest) = line.split_once(": ")?.1.split_once(" operators, ")?;
        Some((all.rsplit(' ').next()?.parse().ok()?, rest.split(' ').next()?.parse().ok()?))
    };
    log.lines().filter_map(|line| numbers(line.split_once("captured ")?.1)).collect()
}

/// The same, as the table says.
fn shown(text: &str) -> Vec<(usize, usize)> {
    let rows = text.lines().filter_map(|line| line.strip_prefix("operators that run "));
    let number = |words: &[&str], at: usize| words[at].parse().unwrap();
    rows.map(|row| row.split_whitespace().collect::<Vec<_>>())
        .map(|words| (number(&words, 3), number(&words, 1)))
        .collect()
}

/// Checks what a text with all operators says against the log of the same captures.
fn check(text: &str, log: &str) {
    assert_eq!(shown(text), captured(log), "{text}\n{log}");
    assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
    let tables: Vec<&str> = text.split("\noperators\n").collect();
    assert_eq!(tables.len(), shown(text).len() + 1, "{text}");
    for (tables, (all, run)) in tables.windows(2).zip(shown(text)) {
        let [head, table] = tables else { unreachable!() };
        let again =
            head.split_once("\nrecomputed: ").map_or("0", |(_, rest)| rest.split(' ').next().unwrap());
        let rows: Vec<&str> = table.lines().skip(1).take_while(|line| !line.is_empty()).collect();
        assert_eq!(rows.len(), all, "{table}");
        let mut chains = BTreeSet::new();
        let mut alone = 0;
        for row in rows {
            match row.split_once(" chain ") {
                Some((_, rest)) => _ = chains.insert(rest.split(' ').next().unwrap()),
                None => alone += usize::from(row.contains("  alone")),
            }
        }
        assert_eq!(chains.len() + alone + again.parse::<usize>().unwrap(), run, "{head}\n{table}");
    }
}

#[test]
fn the_step_of_a_recipe_is_shown_and_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/gpt-tiny.yaml");
    let recipe = recipe.display().to_string();
    let small = ["--data.batch_size=2", "--trainer.accelerator=cpu"];
    let arguments = [&[&recipe[..], "--all", "--picture=step.svg"][..], &small].concat();
    let (text, errors) = show(folder.path(), &arguments);
    assert_eq!(shown(&text).len(), 2, "{text}");
    check(&text, &errors);
    assert!(text.contains("training_step of a batch of [[2, 64], [2, 64]]"), "{text}");
    assert!(text.contains("\nclipping and the optimizer step\n"), "{text}");
    for line in ["gelu", "used next by aten::", "not among the operators that chains have", "transformer.h.0"]
    {
        assert!(text.contains(line), "{line}: {text}");
    }
    let picture = std::fs::read_to_string(folder.path().join("step.svg")).unwrap();
    assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"), "{picture}");
    for what in ["recorded: ", "compiled: ", "aten::mm", "chain 0"] {
        assert!(picture.contains(what), "{what}");
    }
    assert_eq!(picture.matches("<title>").count(), picture.matches("</title></rect>").count());
    let written: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|f| f.unwrap().file_name()).collect();
    assert_eq!(written, ["step.svg"], "a run that shows a step writes nothing else");

    // a summary has the same numbers
    let (summary, errors) = show(folder.path(), &[&["--config", &recipe][..], &small].concat());
    assert_eq!((shown(&summary), captured(&errors)), (shown(&text), shown(&text)));
    assert!(summary.lines().count() < 120 && summary.contains("largest results"), "{summary}");
}

#[test]
fn the_step_of_a_run_is_shown_as_its_keys_show_it() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let keys = ["--model=LeNet", "--data=MnistData", "--data.batch_size=4", "--trainer.accelerator=cpu"];
    let fit = [&["fit"], &keys[..], &["--trainer.max_steps=1", "--trainer.limit_val_batches=0"]].concat();
    let (is_ok, _, errors) = voltaic(folder, &fit);
    assert!(is_ok, "{errors}");
    let (of_run, errors) = show(folder, &["lightning_logs/version_0", "--all"]);
    check(&of_run, &errors);
    let (of_keys, errors) = show(folder, &[&keys[..], &["--all"]].concat());
    check(&of_keys, &errors);
    assert_eq!(of_run, of_keys);
    assert!(of_run.contains("threshold_backward"), "{of_run}");
    let on_hpu = ["--trainer.accelerator=hpu", "--trainer.devices=1", "--trainer.accumulate_grad_batches=2"];
    let (text, errors) = show(folder, &[&["lightning_logs/version_0", "--all"], &on_hpu[..]].concat());
    check(&text, &errors);
    assert_eq!(
        shown(&text).len(),
        3,
        "the steps that open a window and those that add, and the update: {text}"
    );
    assert!(text.contains(", which adds to gradients\n"), "{text}");
    let (is_ok, _, errors) = voltaic(folder, &["graph", "show", "lightning_logs/version_7"]);
    assert!(!is_ok && errors.contains("version_7"), "{errors}");
    for (words, expected) in [(&["graph"][..], "write `graph show`"), (&["graph", "show", "a", "b"], "'b'")] {
        let (is_ok, _, errors) = voltaic(folder, words);
        assert!(!is_ok && errors.contains(expected), "{errors}");
    }
    let (is_ok, help, _) = voltaic(folder, &["graph", "--help"]);
    assert!(is_ok && help.contains("show"), "{help}");
    let (is_ok, help, _) = voltaic(folder, &["graph", "show", "--help"]);
    assert!(is_ok && help.contains("--picture") && help.contains("--trainer.max_epochs"), "{help}");
}

#[derive(Module)]
struct Summed {
    net: Linear,
    #[module(skip)]
    is_static: bool,
}

lightning_module!(Summed, Tensor, Sgd::new(0.1), |net, x, _| {
    let y = net.net.forward(x)?;
    let y = if net.is_static { y } else { y.f_masked_select(&y.f_gt(0.0)?)? };
    Ok(((&y * 2.0).tanh() + 1.0).f_mean(Kind::Float)?)
});

fn shown_graphs(is_static: bool) -> voltaic::Result<Vec<ShownGraph>> {
    let mut module = Summed { net: Linear::new(8, 16).unwrap(), is_static };
    let x = Tensor::randn([32, 8], (Kind::Float, tch::Device::Cpu));
    let loader = DataLoader::new(TensorDataset::new(x).unwrap()).batch_size(4).build().unwrap();
    let before: Vec<Tensor> = module.parameters().iter().map(|p| p.detach().copy()).collect();
    let shown = silent().build().unwrap().show_graphs(&mut module, &mut Loaders::new().train(loader));
    assert!(module.parameters().iter().zip(&before).all(|(p, before)| p.detach().equal(before)));
    shown
}

#[test]
fn numbers_are_those_of_the_plan() {
    let _rng = seeded(3);
    let graphs = shown_graphs(true).unwrap();
    assert_eq!(graphs.len(), 2);
    for graph in &graphs {
        let (stats, recorded, compiled) = (graph.plan_stats(), graph.recorded(), graph.compiled());
        assert_eq!((compiled.num_calls, compiled.planned_bytes), (stats.num_calls, stats.arena_bytes));
        let fused: usize = graph.chains().values().map(|members| members.len()).filter(|len| *len > 1).sum();
        assert_eq!(fused, stats.num_fused);
        assert!(compiled.peak_bytes <= compiled.planned_bytes, "{compiled:?}");
        assert!(compiled.num_calls <= recorded.num_calls && recorded.num_calls <= stats.num_nodes);
    }
    let step = &graphs[0];
    let number = |name: &str| step.graph().nodes.iter().position(|node| node.name() == name).unwrap();
    // x * 2, tanh and + 1 read and write 4 rows of 16 numbers each; as a chain they read them once, and write them and what backward needs
    let (mul, tanh, add) = (number("mul"), number("tanh"), number("add"));
    let chain = step.chains().into_iter().find(|(_, members)| members.contains(&tanh)).unwrap();
    assert_eq!(chain, (add, &[mul, tanh, add][..]));
    let saved = step.recorded().read_bytes - step.compiled().read_bytes;
    assert!(saved >= 2 * 4 * 16 * 4, "{saved}");
    assert_eq!(step.why(mul), None);
    assert!(step.why(add).unwrap().starts_with("used next by aten::mean"), "{:?}", step.why(add));
    assert_eq!(step.why(number("addmm")).unwrap(), "not among the operators that chains have");
}

#[test]
fn a_step_that_cannot_be_compiled_says_why() {
    let _rng = seeded(3);
    assert_error!(shown_graphs(false), "graph show", "aten::masked_select");
}

#[test]
fn a_fallback_can_be_forbidden() {
    if !plays("no fallback") {
        text_of(&own_process("no fallback").env("PT_HPU_USE_EAGER_FALLBACK", "0").output().unwrap());
        return;
    }
    let error = shown_graphs(false).unwrap_err().to_string();
    assert!(
        error.contains("aten::masked_select in or after `net`") && !error.contains("graph show"),
        "{error}"
    );
}

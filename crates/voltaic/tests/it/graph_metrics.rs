//! Habana's metrics: contexts, details, and dump files.

use std::path::{Path, PathBuf};

use serde_json::Value;
use voltaic::graph::{
    GraphedModule, LocalMetric, MetricsFormat, WrapOptions, graph_metrics, mark_step, metric_global,
    metric_localcontext, metrics_dump, reset_metrics, wrap_in_hpu_graph,
};
use voltaic::nn::{Forward, Relu};
use voltaic::{Kind, Tensor};

use crate::probe::{own_process, plays, text_of};

fn net() -> GraphedModule<Relu> {
    wrap_in_hpu_graph(Relu, WrapOptions::default())
}

fn call(net: &GraphedModule<Relu>, rows: i64) {
    let _no_grad = tch::no_grad_guard();
    let y = net.forward(&Tensor::ones([rows, 2], (Kind::Float, tch::Device::Cpu))).unwrap();
    assert_eq!(y.size(), [rows, 2]);
}

fn number(stats: &[(String, f64)], tag: &str) -> f64 {
    stats.iter().find(|(known, _)| known == tag).unwrap_or_else(|| panic!("{tag} in {stats:?}")).1
}

fn compilations(metric: &LocalMetric) -> f64 {
    number(&metric.stats(), "TotalNumber")
}

#[test]
fn each_shape_is_compiled_once() {
    let [graphs, cache] =
        ["graph_compilation", "recipe_cache"].map(|name| metric_localcontext(name).unwrap());
    let (shapes, mut time) = (net(), 0.0);
    for rows in 1..=10 {
        call(&shapes, rows);
        let now = number(&graphs.stats(), "TotalTime");
        assert!(now > time, "{now} after {time}");
        time = now;
    }
    assert_eq!(compilations(&graphs), 10.0);
    assert_eq!((number(&cache.stats(), "TotalMiss"), number(&cache.stats(), "TotalHit")), (10.0, 0.0));

    let [graphs, cache] =
        ["graph_compilation", "recipe_cache"].map(|name| metric_localcontext(name).unwrap());
    let same = net();
    (0..10).for_each(|_| call(&same, 3));
    assert_eq!(compilations(&graphs), 1.0);
    // the second call is a capture, too, which is compared with the first
    assert_eq!((number(&cache.stats(), "TotalMiss"), number(&cache.stats(), "TotalHit")), (1.0, 8.0));
}

#[test]
fn contexts_count_independently() {
    let net = net();
    let mut rows = 0;
    let mut shapes = |number| {
        for _ in 0..number {
            rows += 1;
            call(&net, rows);
        }
    };
    let mut outer = metric_localcontext("graph_compilation").unwrap();
    for number in [3, 2, 3, 2] {
        let inner = metric_localcontext("graph_compilation").unwrap();
        shapes(number);
        assert_eq!(compilations(&inner), f64::from(number));
        reset_metrics(); // is another one's business
    }
    assert_eq!((outer.name(), compilations(&outer)), ("graph_compilation", 10.0));
    assert_eq!(graph_metrics().num_compilations, 0);
    outer.stop();
    shapes(1);
    assert_eq!((compilations(&outer), graph_metrics().num_compilations), (10.0, 1));
    outer.reset();
    assert_eq!(compilations(&outer), 0.0);
    outer.start();
    shapes(2);
    assert_eq!(compilations(&outer), 2.0);
    assert_error!(metric_localcontext("x"), "Metric with given name (x) doesn't exist.");
}

/// What a process dumps that compiles two shapes of three calls each, on two threads, with two calls of `mark_step`.
fn work(folder: &Path) {
    for metric in ["graph_compilation", "cpu_fallback", "memory_defragmentation", "recipe_cache"] {
        assert!(metric_global(metric).unwrap().iter().all(|(_, value)| *value == 0.0), "{metric}");
    }
    let calls = |rows| {
        let net = net();
        (0..3).for_each(|_| call(&net, rows));
        mark_step().unwrap();
    };
    std::thread::scope(|scope| scope.spawn(|| calls(3)).join().unwrap());
    calls(2);
    let stats = metric_global("graph_compilation").unwrap();
    assert_eq!(number(&stats, "TotalNumber"), 1.0, "of this thread");
    let details = stats.iter().filter(|(tag, micros)| tag.starts_with("recipe.graph ") && *micros > 0.0);
    assert_eq!(details.count(), 1, "{stats:?}");
    metrics_dump(folder.join("own.txt"), MetricsFormat::Text).unwrap();
}

fn json(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn metrics_are_dumped_when_the_environment_says_so() {
    if plays("work") {
        return work(&PathBuf::from(std::env::var_os("FOLDER").unwrap()));
    }
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let run = |file: &str, more: &[(&str, &str)]| {
        let mut process = own_process("work");
        process.env(file, at("metrics.json")).env("FOLDER", folder.path());
        text_of(&process.env("PT_HPU_METRICS_GC_DETAILS", "1").envs(more.iter().copied()).output().unwrap());
    };
    run("PT_HPU_METRICS_FILE", &[]);
    let dump = json(&at("metrics.json"));
    let names: Vec<&str> = dump.iter().map(|entry| entry["metric_name"].as_str().unwrap()).collect();
    assert_eq!(names, ["graph_compilation", "cpu_fallback", "memory_defragmentation", "recipe_cache"]);
    assert!(dump.iter().all(|entry| entry["triggered_by"] == "process_exit"), "{dump:?}");
    assert!(dump[0]["generated_on"].as_str().unwrap().starts_with("20"), "{dump:?}");
    assert_eq!(dump[0]["statistics"]["TotalNumber"], 2, "of both threads: {dump:?}");
    assert_eq!(dump[0]["statistics"]["recipe"].as_array().unwrap().len(), 2, "{dump:?}");
    assert_eq!(dump[3]["statistics"], serde_json::json!({"TotalHit": 2, "TotalMiss": 2}));
    let own = std::fs::read_to_string(at("own.txt")).unwrap();
    assert!(own.starts_with("Metric name: graph_compilation\nTriggered by: user\nGenerated on: 20"), "{own}");
    assert!(own.contains("\nStatistics:\n\tTotalHit: 2\n\tTotalMiss: 2\n\n"), "{own}");

    // a file that is there stays
    run("HABANA_PT_METRICS_FILE", &[("PT_HPU_METRICS_DUMP_TRIGGERS", "mark_step,user")]);
    assert_eq!(json(&at("metrics.json")), dump);
    let triggers: Vec<String> = json(&at("metrics.json.1"))
        .iter()
        .map(|entry| entry["triggered_by"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(triggers, [["mark_step"; 4], ["mark_step"; 4], ["user"; 4]].concat());

    run("PT_HPU_METRICS_FILE", &[("RANK", "1"), ("PT_HPU_METRICS_DUMP_TRIGGERS", "metric_change")]);
    let changes = json(&at("metrics-rank1.json"));
    assert_eq!(changes.len(), 2 + 2 + 2, "compilations, misses and hits: {changes:?}");
    assert_eq!(changes[5]["statistics"]["TotalHit"], 2, "{changes:?}");
    assert!(at("own-rank1.txt").is_file());

    run("PT_HPU_METRICS_FILE", &[("RANK", "2"), ("PT_HPU_METRICS_FILE_FORMAT", "text")]);
    let text = std::fs::read_to_string(at("metrics-rank2.json")).unwrap();
    assert_eq!(text.matches("Metric name: ").count(), 4, "{text}");
}

#[test]
fn each_rank_has_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let fit = "fit --model=LeNet --data=MnistData --data.batch_size=2 --trainer.max_steps=1 --trainer.limit_val_batches=0 \
               --trainer.accelerator=cpu --trainer.devices=2 --trainer.strategy=ddp";
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_voltaic"))
        .args(fit.split_whitespace())
        .current_dir(folder.path())
        .env("PT_HPU_METRICS_FILE", "metrics.json")
        .output()
        .unwrap();
    text_of(&output);
    for rank in 0..2 {
        assert_eq!(json(&folder.path().join(format!("metrics-rank{rank}.json"))).len(), 4);
    }
}

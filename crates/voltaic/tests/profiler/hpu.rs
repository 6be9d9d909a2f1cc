//! What emulated HPUs do, in traces and tables.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;
use voltaic::profiler::{HpuProfiler, HpuProfilerConfig, ProfilerActivity, ProfilerSchedule};
use voltaic::trainer::{GraphMode, TrainerBuilder};

use crate::{Net, alone, count, loaders, traces_in, trainer};

fn config(folder: &Path) -> HpuProfilerConfig {
    HpuProfilerConfig {
        dirpath: Some(folder.to_owned()),
        filename: Some("perf".to_owned()),
        row_limit: None,
        ..HpuProfilerConfig::default()
    }
}

fn on_hpu(folder: &Path) -> TrainerBuilder {
    trainer(folder).accelerator("hpu").devices(1).limit_val_batches(0)
}

/// All events of the one trace of a fit of eight steps, and its report.
fn fitted(folder: &Path, config: &HpuProfilerConfig, builder: TrainerBuilder) -> (Value, String) {
    let profiler = HpuProfiler::new(config).unwrap();
    let mut trainer = builder.with_profiler(profiler.clone()).build().unwrap();
    trainer.fit(&mut Net::new(None), &mut loaders(8)).unwrap();
    let traces = profiler.traces();
    assert_eq!(traces.len(), 1, "{:?}", traces_in(folder));
    let trace = serde_json::from_slice(&std::fs::read(&traces[0]).unwrap()).unwrap();
    let report = std::fs::read_to_string(folder.join("fit-perf.txt")).unwrap();
    (trace, report)
}

fn all(trace: &Value) -> Vec<Value> {
    trace["traceEvents"].as_array().unwrap().clone()
}

fn of<'a>(events: &'a [Value], category: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["ph"] == "X" && event["cat"] == category).collect()
}

fn number(event: &Value, key: &str) -> f64 {
    event[key].as_f64().unwrap_or_else(|| panic!("{event}"))
}

#[test]
fn device_operations_have_rows_of_their_own_and_arrows_from_their_operators() {
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    let (trace, report) = fitted(folder.path(), &config(folder.path()), on_hpu(folder.path()));
    assert_eq!(trace["deviceProperties"][0]["name"], "emulated gaudi2");
    let events = all(&trace);
    let operators: BTreeMap<u64, &Value> = of(&events, "cpu_op")
        .into_iter()
        .map(|event| (event["args"]["External id"].as_u64().unwrap(), event))
        .collect();
    let kernels = of(&events, "Kernel");
    for (name, times) in [("aten::addmm", 6), ("aten::_fused_adamw_", 3), ("aten::relu", 3)] {
        assert_eq!(kernels.iter().filter(|event| event["name"] == name).count(), times, "{name}");
    }
    for kernel in &kernels {
        let operator = operators[&kernel["args"]["External id"].as_u64().unwrap()];
        let (start, end) = (number(operator, "ts"), number(operator, "ts") + number(operator, "dur"));
        let began = number(kernel, "ts");
        assert!(began >= start && began + number(kernel, "dur") <= end + 1.0, "{kernel} of {operator}");
        assert_eq!(
            (&kernel["pid"], &kernel["tid"], &kernel["args"]["device"]),
            (&0.into(), &0.into(), &0.into())
        );
    }
    let addmm = kernels.iter().find(|kernel| kernel["name"] == "aten::addmm").unwrap();
    assert_eq!(operators[&addmm["args"]["External id"].as_u64().unwrap()]["name"], "aten::addmm");

    // an arrow for each operation and copy, from where the host launches it
    let copies = of(&events, "Memcpy");
    assert!(copies.iter().any(|copy| copy["name"] == "Memcpy HtoD" && copy["args"]["bytes"] == 2 * 8 * 4));
    let ids = |phase: &str| -> BTreeSet<u64> {
        let arrows = events.iter().filter(|event| event["ph"] == phase && event["cat"] == "ac2g");
        arrows.map(|event| event["id"].as_u64().unwrap()).collect()
    };
    assert_eq!(ids("s").len(), kernels.len() + copies.len());
    assert_eq!(ids("s"), ids("f"));
    let named = |name: &str, value: &str| {
        let mut named = events.iter().filter(|event| event["ph"] == "M" && event["name"] == name);
        named.any(|event| event["args"]["name"] == value && event["pid"] == 0)
    };
    assert!(named("process_name", "hpu:0 (emulated gaudi2)"));
    assert!(named("thread_name", "operators") && named("thread_name", "memory copies"));

    // how much memory is in use, which the weights are part of
    let counters: Vec<u64> = events
        .iter()
        .filter(|event| event["ph"] == "C")
        .map(|event| event["args"]["in use"].as_u64().unwrap())
        .collect();
    assert!(counters.len() > 10 && counters.iter().all(|&bytes| bytes > 800), "{counters:?}");

    let row = report.lines().find(|line| line.trim_start().starts_with("aten::addmm")).unwrap();
    let titles = report.lines().nth(2).unwrap();
    assert!(titles.contains("Self HPU") && titles.contains("HPU total"), "{report}");
    assert_eq!(row.split_whitespace().nth(10), Some("6"), "{report}");
    assert!(report.contains("Self HPU time total: "), "{report}");
}

#[test]
fn a_graph_shows_when_it_is_captured_and_replayed_and_its_operators_on_the_device() {
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    // the first steps run as they are, and are captured
    let schedule = ProfilerSchedule { wait: 0, warmup: 0, active: 8, ..ProfilerSchedule::default() };
    let config = HpuProfilerConfig { schedule: Some(schedule), ..config(folder.path()) };
    let builder = on_hpu(folder.path()).graph(GraphMode::Step);
    let (trace, report) = fitted(folder.path(), &config, builder);
    let events = all(&trace);
    let graphs: Vec<&Value> =
        of(&events, "Runtime").into_iter().filter(|event| event["name"] != "launch").collect();
    let named = |name: &str| graphs.iter().filter(|event| event["name"] == name).count();
    assert!(named("graph capture") >= 1 && named("graph replay") >= 3, "{graphs:?}");
    // what replays is not called by the host
    let kernels: Vec<Value> = of(&events, "Kernel").into_iter().cloned().collect();
    let host: Vec<Value> = of(&events, "cpu_op").into_iter().cloned().collect();
    let (on_device, on_host) = (count(&kernels, "aten::addmm"), count(&host, "aten::addmm"));
    assert!(on_device >= 16 && on_host < on_device, "{on_device} {on_host}");
    let replay = graphs.iter().find(|event| event["name"] == "graph replay").unwrap();
    let (start, end) = (number(replay, "ts"), number(replay, "ts") + number(replay, "dur"));
    let within = kernels.iter().filter(|kernel| number(kernel, "ts") >= start && number(kernel, "ts") <= end);
    assert!(within.count() >= 10, "{replay}");
    let row = report.lines().find(|line| line.trim_start().starts_with("aten::addmm")).unwrap();
    assert_eq!(row.split_whitespace().nth(10), Some(&*on_device.to_string()), "{report}");
}

#[test]
fn a_graph_on_the_cpu_shows_what_it_replays_in_rows_of_the_host() {
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    let schedule = ProfilerSchedule { wait: 0, warmup: 0, active: 8, ..ProfilerSchedule::default() };
    let config = HpuProfilerConfig { schedule: Some(schedule), ..config(folder.path()) };
    let builder = trainer(folder.path()).limit_val_batches(0).graph(GraphMode::Step);
    let (trace, report) = fitted(folder.path(), &config, builder);
    let events = all(&trace);
    let replays = of(&events, "Runtime").into_iter().filter(|event| event["name"] == "graph replay").count();
    let host: Vec<Value> = of(&events, "cpu_op").into_iter().cloned().collect();
    let (replayed, called): (Vec<Value>, Vec<Value>) =
        host.into_iter().partition(|event| event["tid"].as_u64() >= Some(1_000_000_000));
    let (replayed, called) = (count(&replayed, "aten::addmm"), count(&called, "aten::addmm"));
    // two layers in each of eight steps, replayed or not
    assert!(replays >= 3 && replayed >= 6 && replayed + called == 16, "{replays}: {replayed}, {called}");
    let rows = events.iter().filter(|event| event["name"] == "thread_name");
    let rows: BTreeSet<&str> = rows.map(|event| event["args"]["name"].as_str().unwrap()).collect();
    assert!(rows.contains("replayed operators") && rows.contains("graphs"), "{rows:?}");
    let row = report.lines().find(|line| line.trim_start().starts_with("aten::addmm")).unwrap();
    assert_eq!(row.split_whitespace().nth(6), Some("16"), "of eight steps: {report}");
    // each product has its kernel, replayed or not; libtorch's clock may be some microseconds apart on a busy machine, and show one of an
    // operator that is called at the one before it
    let products =
        |row: &str| row.rsplit_once("product (Gemm) x ").map_or(0, |(_, count)| count.parse().unwrap());
    let all: usize = report.lines().map(products).sum();
    let calls = |name: &str| {
        let row = report.lines().find(|line| line.split_whitespace().next() == Some(name)).unwrap();
        row.split_whitespace().nth(6).unwrap().parse::<usize>().unwrap()
    };
    assert!(all == 0 || all == calls("aten::addmm") + calls("aten::mm"), "{all} kernels: {report}");
    assert!(all == 0 || products(row) >= replayed, "the clock of replays is that of kernels: {row}");
}

#[test]
fn memory_is_told_by_change_and_by_operator() {
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    let config = HpuProfilerConfig { profile_memory: true, ..config(folder.path()) };
    let (trace, report) = fitted(folder.path(), &config, on_hpu(folder.path()));
    let events = all(&trace);
    let changes: Vec<&Value> = events.iter().filter(|event| event["name"] == "[memory]").collect();
    let on_device = |change: &&&Value| change["args"]["Device Type"] == 1;
    let (mut taken, mut given_back) = (0, 0);
    for change in changes.iter().filter(on_device) {
        assert_eq!(change["args"]["Device Id"], 0);
        match change["args"]["Bytes"].as_i64().unwrap() {
            bytes if bytes > 0 => taken += 1,
            _ => given_back += 1,
        }
    }
    assert!(taken > 20 && given_back > 20, "{taken} {given_back}");
    assert!(changes.iter().any(|change| change["args"]["Device Type"] == 0), "the host's");
    let titles = report.lines().nth(2).unwrap();
    assert!(titles.contains("CPU Mem") && titles.contains("Self HPU Mem"), "{report}");
    // the output of the layers: 2 x 16 and 2 x 4 numbers in each of three steps
    let row = report.lines().find(|line| line.trim_start().starts_with("aten::addmm")).unwrap();
    assert!(row.contains(&format!("{} B", 3 * 4 * (2 * 16 + 2 * 4))), "{row}");
}

#[test]
fn activities_choose_between_host_and_device() {
    let _alone = alone();
    for (activities, host, device) in
        [(vec![ProfilerActivity::Cpu], true, false), (vec![ProfilerActivity::Hpu], false, true)]
    {
        let folder = TempDir::new().unwrap();
        let config = HpuProfilerConfig { activities, ..config(folder.path()) };
        let (trace, _) = fitted(folder.path(), &config, on_hpu(folder.path()));
        let events = all(&trace);
        assert_eq!((of(&events, "cpu_op").is_empty(), of(&events, "Kernel").is_empty()), (!host, !device));
        assert!(!of(&events, "user_annotation").is_empty());
    }
    let none = HpuProfilerConfig { activities: Vec::new(), ..HpuProfilerConfig::default() };
    assert_error!(HpuProfiler::new(&none), "activities", "records nothing");
}

#[test]
fn on_the_cpu_only_the_host_is_recorded() {
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    let (trace, report) =
        fitted(folder.path(), &config(folder.path()), trainer(folder.path()).limit_val_batches(0));
    let events = all(&trace);
    assert!(of(&events, "Kernel").is_empty() && of(&events, "Memcpy").is_empty());
    let host: Vec<Value> = of(&events, "cpu_op").into_iter().cloned().collect();
    assert_eq!(count(&host, "aten::linear"), 6);
    assert!(!report.contains("HPU total"), "{report}");
}

#[test]
fn stacks_of_a_flame_graph_are_written_beside_the_trace() {
    let _alone = alone();
    for (metric, stack) in [
        ("self_cpu_time_total", "[pl][profile][module]Linear: first;aten::linear;aten::addmm "),
        ("self_hpu_time_total", "aten::linear;aten::addmm "),
    ] {
        let folder = TempDir::new().unwrap();
        let config = HpuProfilerConfig {
            export_to_flame_graph: true,
            with_modules: true,
            metric: metric.to_owned(),
            ..config(folder.path())
        };
        fitted(folder.path(), &config, on_hpu(folder.path()));
        let name = traces_in(folder.path()).into_iter().find(|name| name.ends_with(".stack")).unwrap();
        let stacks = std::fs::read_to_string(folder.path().join(name)).unwrap();
        assert!(stacks.lines().any(|line| line.contains(stack)), "{stacks}");
        for line in stacks.lines() {
            assert!(line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap() > 0, "{line}");
        }
    }
    let unknown = HpuProfilerConfig { metric: "time".to_owned(), ..HpuProfilerConfig::default() };
    let error = HpuProfiler::new(&unknown).unwrap_err().to_string();
    assert!(error.contains("`time` is not a time that a flame graph shows; use one of self_cpu"), "{error}");
}

#[test]
fn a_program_is_told_of_each_trace() {
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let profiler = HpuProfiler::new(&config(folder.path()))
        .unwrap()
        .on_trace_ready(move |path| sender.send(path.to_owned()).unwrap());
    let mut trainer = on_hpu(folder.path()).with_profiler(profiler.clone()).build().unwrap();
    trainer.fit(&mut Net::new(None), &mut loaders(6)).unwrap();
    assert_eq!(receiver.try_iter().collect::<Vec<_>>(), profiler.traces());
}

/// A page in a browser without a window; none where there is no browser.
fn in_browser(page: &Path, folder: &Path) -> Option<String> {
    let browser = ["chromium", "chromium-browser", "google-chrome"].into_iter().find(|name| {
        std::process::Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success())
    })?;
    let run = |argument: String| {
        let output = std::process::Command::new(browser)
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--window-size=1500,1900",
            ])
            .args(["--virtual-time-budget=5000", "--timeout=60000", "--host-resolver-rules=MAP * ~NOTFOUND"])
            .arg(format!("--user-data-dir={}", folder.join("browser").display()))
            .arg(argument)
            .arg(format!("file://{}", page.display()))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    run(format!("--screenshot={}", folder.join("page.png").display()));
    Some(run("--dump-dom".to_owned()))
}

#[test]
fn the_page_shows_timeline_flame_graph_memory_and_table_in_a_browser() {
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    let config = HpuProfilerConfig { with_modules: true, ..config(folder.path()) };
    fitted(folder.path(), &config, on_hpu(folder.path()));
    let name = traces_in(folder.path()).into_iter().find(|name| name.ends_with(".html")).unwrap();
    let page = folder.path().join(name);
    // nothing is loaded from elsewhere
    let text = std::fs::read_to_string(&page).unwrap();
    assert!(!text.contains("<script src") && !text.contains("<link"));
    // operators come before the steps and actions that contain them
    let data = text.split(r#"type="application/json">"#).nth(1).unwrap().split("</script>").next().unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["sorted"], "Self HPU");
    let first = data["table"][1][0].as_str().unwrap();
    assert!(first.starts_with("aten::"), "{first}");
    let Some(shown) = in_browser(&page, folder.path()) else {
        println!("no browser is installed: the page was written, not opened");
        return;
    };
    assert!(
        shown.contains(r#"data-drawn="timeline flame memory operators""#),
        "{}",
        &shown[shown.len() - 2000..]
    );
    assert!(!shown.contains("data-error"));
    let body = shown.split("<tbody>").nth(1).unwrap().split("</tbody>").next().unwrap();
    let rows: Vec<&str> = body.split("<tr>").skip(1).collect();
    assert!(rows.len() > 30, "{}", rows.len());
    let row = rows.iter().find(|row| row.starts_with("<td>aten::addmm</td>")).unwrap();
    assert!(row.starts_with(r#"<td>aten::addmm</td><td>6</td><td class="words">product"#), "{row}");
    assert!(row.contains(" µs</td>") && !shown.split("<tbody>").nth(1).unwrap().contains("us</td>"), "{row}");
    // the flame graph's boxes have their names
    assert!(
        shown.split("id=\"flame\"").nth(1).unwrap().contains("run_training_batch"),
        "boxes without names"
    );
    let picture = std::fs::read(folder.path().join("page.png")).unwrap();
    assert!(picture.len() > 50_000, "{} bytes: an empty page", picture.len());
    if let Some(keep) = std::env::var_os("VOLTAIC_TEST_KEEP_PAGE") {
        std::fs::copy(folder.path().join("page.png"), &keep).unwrap();
        std::fs::copy(&page, Path::new(&keep).with_extension("html")).unwrap();
    }
}

#[test]
fn names_of_ranges_are_kept_whatever_is_in_them() {
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    let profiler = HpuProfiler::new(&config(folder.path())).unwrap();
    let mut run = on_hpu(folder.path()).with_profiler(profiler.clone()).build().unwrap();
    let names = Net::named(profiler.clone(), "a \"quoted\"\n</script> \\ name, ä");
    run.fit(&mut { names }, &mut loaders(6)).unwrap();
    let trace: Value = serde_json::from_slice(&std::fs::read(&profiler.traces()[0]).unwrap()).unwrap();
    let expected = "[pl][profile]a \"quoted\"\n</script> \\ name, ä";
    assert_eq!(count(&all(&trace), expected), 3);
    let page = traces_in(folder.path()).into_iter().find(|name| name.ends_with(".html")).unwrap();
    let page = std::fs::read_to_string(folder.path().join(page)).unwrap();
    assert!(page.contains(r"\u003c/script> \\ name, ä") && !page.contains("quoted\\\"\\n</script>"));
}

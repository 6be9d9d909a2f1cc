//! Groups of ranks: threads of this process that meet at a store.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, setrlimit};
use serde::{Deserialize, Serialize};
use voltaic::accelerator::{HpuEmulator, HpuSettings};
use voltaic::distributed::{ClusterEnvironment, ProcessGroup, RankPlacement, ReduceOp, World};
use voltaic::error::DistributedError;
use voltaic::{Device, Error, Kind, Tensor};

const CPU: tch::Device = tch::Device::Cpu;

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

pub fn placement(rank: usize, world_size: usize, port: u16) -> RankPlacement {
    RankPlacement {
        environment: ClusterEnvironment::Lightning,
        rank,
        world_size,
        local_rank: rank,
        node_rank: 0,
        master_addr: "127.0.0.1".to_owned(),
        master_port: port,
        hosts_store: rank == 0,
        launcher: None,
        elastic_run: None,
        secret: None,
        attempt: 0,
    }
}

/// Runs `body` as each rank of a group of processes: this test's own, started again with `LOCAL_RANK`.
pub fn as_ranks(world_size: usize, body: impl Fn(Arc<ProcessGroup>)) {
    as_ranks_with(world_size, |_| None, body);
}

/// The same with all that ranks know of each other. What `before` makes is there for them; they find a path in a variable.
pub fn as_ranks_of_world(
    world_size: usize,
    (variable, path): (&str, &Path),
    before: impl FnOnce(),
    body: impl Fn(World),
) {
    if !crate::probe::plays(&format!("rank of {world_size}")) {
        {
            let _rng = crate::rng::seeded(3);
            before();
        }
        return run_ranks_with(
            world_size,
            &|command, _| {
                command.env(variable, path);
            },
            |_| true,
        );
    }
    let world = join(world_size, Duration::from_secs(30));
    body(world.clone());
    world.barrier().unwrap(); // rank 0 has the store
}

/// The same, each with a variable of its own in the environment.
pub fn as_ranks_with(
    world_size: usize,
    variable: fn(usize) -> Option<(&'static str, &'static str)>,
    body: impl Fn(Arc<ProcessGroup>),
) {
    if !crate::probe::plays(&format!("rank of {world_size}")) {
        return run_ranks(world_size, variable, |_| true);
    }
    let world = join(world_size, Duration::from_secs(30));
    body(world.group().unwrap().clone());
    world.barrier().unwrap(); // rank 0 has the store
}

/// The same with a time-out, for ranks that may end badly: those that do not are waited for by their output.
pub fn as_ranks_within(world_size: usize, timeout: Duration, body: impl Fn(Arc<ProcessGroup>)) {
    if !crate::probe::plays(&format!("rank of {world_size}")) {
        return start_ranks(world_size, |_| true);
    }
    let world = join(world_size, timeout);
    body(world.group().unwrap().clone());
    println!("\nrank {} is done", world.rank);
    std::io::read_to_string(std::io::stdin()).unwrap(); // rank 0 has the store
}

fn join(world_size: usize, timeout: Duration) -> World {
    let number = |name: &str| std::env::var(name).unwrap().parse::<u16>().unwrap();
    let placement = placement(number("LOCAL_RANK").into(), world_size, number("MASTER_PORT"));
    World::join(&placement, Device::Cpu, timeout).unwrap()
}

/// Starts this test again as each rank; the ranks for which `counts` is true must end well.
pub fn start_ranks(world_size: usize, counts: fn(usize) -> bool) {
    run_ranks(world_size, |_| None, counts);
}

fn run_ranks(
    world_size: usize,
    variable: fn(usize) -> Option<(&'static str, &'static str)>,
    counts: fn(usize) -> bool,
) {
    run_ranks_with(
        world_size,
        &|command, rank| {
            command.envs(variable(rank));
        },
        counts,
    );
}

fn run_ranks_with(world_size: usize, prepare: &dyn Fn(&mut Command, usize), counts: fn(usize) -> bool) {
    let port = free_port();
    let start = |rank: usize| {
        let mut command = crate::probe::own_process(&format!("rank of {world_size}"));
        command.env("LOCAL_RANK", rank.to_string()).env("MASTER_PORT", port.to_string());
        prepare(&mut command, rank);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let ranks: Vec<_> = (0..world_size).map(start).collect();
    // from the last to the first, which has the store; waiting closes a rank's standard input
    for (rank, process) in ranks.into_iter().enumerate().rev() {
        let output = process.wait_with_output().unwrap();
        if counts(rank) {
            crate::probe::text_of(&output);
        }
    }
}

pub fn floats(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.flatten(0, -1)).unwrap()
}

/// A value that cannot be written on some ranks.
#[derive(Debug, Deserialize)]
struct Odd {
    fails: bool,
}

impl Serialize for Odd {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.fails {
            true => Err(serde::ser::Error::custom("it has none")),
            false => serializer.serialize_bool(true),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Note {
    rank: usize,
    text: String,
}

#[test]
fn three_ranks_exchange_tensors_and_objects() {
    as_ranks(3, |group| {
        let rank = group.rank() as f32;
        let own = || Tensor::from_slice(&[rank, rank + 1.0]);
        for (op, expected) in [
            (ReduceOp::Sum, [3.0, 6.0]),
            (ReduceOp::Avg, [1.0, 2.0]),
            (ReduceOp::Min, [0.0, 1.0]),
            (ReduceOp::Max, [2.0, 3.0]),
        ] {
            let tensor = own();
            group.all_reduce(&tensor, op).unwrap();
            assert_eq!(floats(&tensor), expected, "{op:?}");
        }
        for kind in [Kind::Double, Kind::Half, Kind::BFloat16, Kind::Int64, Kind::Int] {
            let tensor = own().to_kind(kind);
            group.all_reduce(&tensor, ReduceOp::Sum).unwrap();
            assert_eq!(floats(&tensor.to_kind(Kind::Float)), [3.0, 6.0], "{kind:?}");
        }
        let tensor = own();
        group.broadcast(&tensor, 2).unwrap();
        assert_eq!(floats(&tensor), [2.0, 3.0]);
        let all = group.all_gather(&own()).unwrap();
        assert_eq!((all.size(), floats(&all)), (vec![3, 2], vec![0.0, 1.0, 1.0, 2.0, 2.0, 3.0]));
        let part =
            group.reduce_scatter(&(Tensor::arange(6, (Kind::Float, CPU)) + f64::from(rank)), ReduceOp::Sum);
        let first = 3.0 * 2.0 * rank + 3.0;
        assert_eq!(floats(&part.unwrap()), [first, first + 3.0]);
        let (next, previous) = ((group.rank() + 1) % 3, (group.rank() + 2) % 3);
        let received = Tensor::zeros([2], (Kind::Float, CPU));
        if group.rank() == 0 {
            group.send(&own(), next).unwrap();
            group.recv(&received, previous).unwrap();
        } else {
            group.recv(&received, previous).unwrap();
            group.send(&own(), next).unwrap();
        }
        assert_eq!(floats(&received), [previous as f32, previous as f32 + 1.0]);
        let note = |rank: usize| Note { rank, text: "x".repeat(rank * 100) };
        assert_eq!(group.broadcast_object(&note(group.rank()), 1).unwrap(), note(1));
        let notes = group.all_gather_object(&note(group.rank())).unwrap();
        assert_eq!(notes, [note(0), note(1), note(2)]);
        // numbers that are not finite, and a number in the place of another, as bits
        let numbers = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.1, f64::MIN_POSITIVE];
        let given = (numbers, Some(f64::NAN), None::<f64>, f32::NAN, serde_json::json!({"a": [1, null]}));
        let bits = |of: &(_, Option<f64>, Option<f64>, f32, serde_json::Value)| {
            let numbers: &[f64; 6] = &of.0;
            (numbers.map(f64::to_bits), of.1.map(f64::to_bits), of.2, of.3.to_bits(), of.4.clone())
        };
        assert_eq!(bits(&group.broadcast_object(&given, 2).unwrap()), bits(&given));
        assert!(group.all_gather_object(&given).unwrap().iter().all(|other| bits(other) == bits(&given)));
        // a value that serde cannot write, on one rank
        let odd = Odd { fails: group.rank() == 1 };
        let error = group.all_gather_object(&odd).unwrap_err().to_string();
        assert!(error.contains("all_gather_object") && error.contains("Odd"), "{error}");
        assert!(
            error.contains(if group.rank() == 1 { "it has none" } else { "rank 1 could not send" }),
            "{error}"
        );
        assert_error!(group.broadcast_object(&odd, 1), "broadcast_object");
        group.barrier().unwrap();
        // several under way at once
        let tensors: Vec<Tensor> = (0..4).map(|i| own() * f64::from(i)).collect();
        let pending: Vec<_> =
            tensors.iter().map(|tensor| group.start_all_reduce(tensor, ReduceOp::Sum).unwrap()).collect();
        pending.into_iter().for_each(|pending| pending.wait().unwrap());
        assert_eq!(floats(&tensors[3]), [9.0, 18.0]);
    });
}

#[test]
fn tensors_of_hpus_are_exchanged_as_those_of_the_cpu() {
    as_ranks(3, |group| {
        HpuEmulator::init(HpuSettings::default()).unwrap();
        let rank = group.rank() as f64;
        let on = |device: Device| (Tensor::arange(12, (Kind::Float, CPU)) + rank).to_device(device.into());
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max] {
            let run = |device| {
                let whole = on(device);
                let part = whole.narrow(0, 3, 6).view([2, 3]); // begins within its memory
                group.all_reduce(&part, op).unwrap();
                let scattered = group.reduce_scatter(&on(device), op).unwrap();
                let scalar = on(device).mean(Kind::Float);
                group.all_reduce(&scalar, op).unwrap();
                let _ = part.shallow_clone().g_add_scalar_(1.0); // it can still be written to
                (floats(&whole), floats(&scattered), floats(&scalar))
            };
            assert_eq!(run(Device::Hpu(0)), run(Device::Cpu), "{op:?}");
        }
        let gathered = group.all_gather(&on(Device::Hpu(1))).unwrap();
        assert_eq!(Device::of(&gathered).unwrap(), Device::Hpu(1));
        assert_eq!(floats(&gathered), floats(&group.all_gather(&on(Device::Cpu)).unwrap()));
        let sent = on(Device::Hpu(0));
        group.broadcast(&sent, 1).unwrap();
        assert_eq!(floats(&sent)[0], 1.0);
    });
}

/// Sums of float32 and bfloat16, equal to those of float64, which are Gloo's.
fn check_sums(group: &ProcessGroup) {
    tch::manual_seed(group.rank() as i64);
    for kind in [Kind::Float, Kind::BFloat16] {
        for len in [1, 1000, 3 << 20] {
            let tensor = Tensor::randn([len], (Kind::Float, CPU)).to_kind(kind);
            let exact = tensor.to_kind(Kind::Double);
            group.all_reduce(&tensor, ReduceOp::Sum).unwrap();
            group.all_reduce(&exact, ReduceOp::Sum).unwrap();
            assert_eq!(tensor, exact.to_kind(Kind::Float).to_kind(kind), "{len} {kind:?}");
        }
    }
}

#[test]
fn ranks_on_one_host_share_memory() {
    as_ranks(2, |group| {
        assert!(group.shares_memory());
        check_sums(&group);
    });
}

#[test]
fn no_rank_shares_memory_unless_all_do() {
    let second = |rank| (rank == 1).then_some(("VOLTAIC_SHARED_MEMORY", "0"));
    as_ranks_with(2, second, |group| {
        assert!(!group.shares_memory());
        check_sums(&group);
    });
}

#[test]
fn a_sum_over_ranks_has_the_sum_of_the_gradients() {
    as_ranks(2, |group| {
        let x = Tensor::from_slice(&[1.0_f32 + group.rank() as f32]).set_requires_grad(true);
        let y = group.differentiable_sum(&x).unwrap();
        assert_eq!(floats(&y), [3.0]);
        // rank r's loss is (r + 1) y^2, whose derivative is 6 (r + 1)
        (y.square() * (group.rank() as f64 + 1.0)).backward();
        assert_eq!(floats(&x.grad()), [18.0]);
    });
}

#[test]
fn misuse_is_refused_before_anything_is_sent() {
    let world = World::join(&placement(0, 1, 0), Device::Cpu, Duration::from_secs(5)).unwrap();
    let group = world.group().unwrap();
    let tensor = Tensor::zeros([2, 3], (Kind::Float, CPU));
    let error = group.all_reduce(&tensor.transpose(0, 1), ReduceOp::Sum).unwrap_err().to_string();
    assert!(error.contains("not contiguous; call contiguous()"), "{error}");
    assert!(group.broadcast(&tensor, 1).unwrap_err().to_string().contains("rank 1 of 1; ranks count"));
    group.all_reduce(&tensor, ReduceOp::Sum).unwrap();
}

/// The error of a rank that joins alone.
fn refused(placement: &RankPlacement) -> String {
    let error = World::join(placement, Device::Cpu, Duration::from_millis(600)).unwrap_err();
    assert!(matches!(&error, Error::Distributed(DistributedError::Rendezvous { .. })), "{error}");
    error.to_string()
}

#[test]
fn ranks_that_do_not_come_are_named() {
    let error = refused(&placement(0, 3, free_port()));
    assert!(error.contains("ranks 1, 2 of 3 did not come within 0.6 s; look at their output"), "{error}");
}

#[test]
fn a_port_in_use_and_an_unknown_host_are_named() {
    let taken = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    assert_contains!(
        refused(&placement(0, 2, port)),
        &format!("MASTER_PORT={port} is in use on this host; set MASTER_PORT")
    );
    let unknown = RankPlacement { master_addr: "no-such-host.invalid".to_owned(), ..placement(1, 2, port) };
    assert_contains!(refused(&unknown), "MASTER_ADDR=no-such-host.invalid is not a known host");
}

#[test]
fn nobody_at_the_address_is_told() {
    assert_contains!(refused(&placement(1, 2, free_port())), "nothing answers within 0.6 s", "MASTER_PORT");
}

/// What processes that join at one store say, by their place in `placements` (rank and world size). The first holds
/// the store, and stays until the others are done.
fn join_together(placements: &[(usize, usize)]) -> Option<Vec<String>> {
    const NUMBER: &str = "VOLTAIC_TEST_NUMBER";
    if crate::probe::plays("one of them") {
        let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
        let (rank, world_size) = placements[number(NUMBER)];
        let hosts_store = number(NUMBER) == 0;
        let placement =
            RankPlacement { hosts_store, ..placement(rank, world_size, number("MASTER_PORT") as u16) };
        match World::join(&placement, Device::Cpu, Duration::from_secs(60)) {
            Ok(_) => println!("\njoined"),
            Err(error) => println!("\nrefused: {error}"),
        }
        if hosts_store {
            std::io::read_to_string(std::io::stdin()).unwrap();
        }
        return None;
    }
    let port = free_port();
    let start = |number: usize| {
        let mut command = crate::probe::own_process("one of them");
        command.env(NUMBER, number.to_string()).env("MASTER_PORT", port.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let mut processes: Vec<_> = (0..placements.len()).map(start).collect();
    let first = processes.remove(0);
    let text = |process: std::process::Child| crate::probe::text_of(&process.wait_with_output().unwrap());
    let mut texts: Vec<String> = processes.into_iter().map(text).collect();
    texts.insert(0, text(first)); // closes its standard input
    Some(texts)
}

#[test]
fn ranks_that_believe_in_different_world_sizes_are_refused() {
    let Some(texts) = join_together(&[(0, 2), (1, 3)]) else { return };
    for text in &texts {
        assert!(text.contains("rank 0 expects 2 ranks, rank 1 (process"), "{text}");
        assert!(text.contains("expects 3; use the same trainer.devices, trainer.num_nodes"), "{text}");
    }
}

#[test]
fn a_rank_that_nobody_expects_is_refused() {
    let Some(texts) = join_together(&[(0, 2), (1, 2), (2, 3)]) else { return };
    assert!(texts[0].contains("joined") && texts[1].contains("joined"), "{texts:?}");
    assert!(texts[2].contains("this rank expects 3 ranks, rank 0 (process"), "{texts:?}");
}

#[test]
fn two_processes_of_one_rank_are_told() {
    let Some(texts) = join_together(&[(0, 2), (1, 2), (1, 2)]) else { return };
    let refused: Vec<&String> =
        texts.iter().filter(|text| text.contains("another process is rank 1")).collect();
    assert_eq!(refused.len(), 1, "{texts:?}");
    assert!(refused[0].contains("give each process a rank of its own: NODE_RANK for each node"), "{texts:?}");
    assert!(texts[0].contains("joined"), "{texts:?}");
}

#[test]
fn too_few_open_files_are_named() {
    if crate::probe::plays("few files") {
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
        let limit = Some(open() + 4);
        setrlimit(Resource::Nofile, Rlimit { current: limit, maximum: limit }).unwrap();
        let joined = World::join(&placement(0, 2, free_port()), Device::Cpu, Duration::from_secs(30));
        let error = joined.unwrap_err().to_string();
        return assert!(error.contains("open files") && error.contains("ulimit -n 1024"), "{error}");
    }
    crate::probe::text_of(&crate::probe::own_process("few files").output().unwrap());
}

#[test]
fn an_unreachable_master_is_one_clear_line() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let rank = [
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", port.as_str()),
        ("WORLD_SIZE", "2"),
        ("RANK", "1"),
        ("LOCAL_RANK", "1"),
    ];
    let fit = |more: &[(&str, &str)]| {
        let ddp =
            ["--trainer.devices=2", "--trainer.strategy=DDPStrategy", "--trainer.strategy.timeout_secs=0.6"];
        crate::probe::short_fit(&ddp, &[&rank, more].concat())
    };
    let (code, log) = fit(&[]);
    assert_eq!((code, log.lines().count()), (Some(1), 1), "{log}");
    let expected = format!(
        "error: rank 1 of 2 could not join the others at 127.0.0.1:{port}: nothing answers within 0.6 s"
    );
    assert!(log.starts_with(&expected) && log.contains("check MASTER_ADDR and MASTER_PORT"), "{log}");
    let (_, log) = fit(&[("TORCH_CPP_LOG_LEVEL", "ERROR")]);
    assert!(log.contains("frame #"), "who asks for c10d's own lines gets them: {log}");
}

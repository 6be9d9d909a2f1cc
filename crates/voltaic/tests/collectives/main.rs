//! NCCL and HCCL, as far as they can be tested without their devices: a stand-in for their libraries is compiled here, and
//! processes of this host exchange tensors through it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test")]

#[path = "../support/compile.rs"]
mod compile;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use compile::compile;
use voltaic::ffi::{Backend, CollectiveApi, CollectiveLibrary, ReduceOp, Seat};
use voltaic::{Device, Kind, Tensor};

const CPU: tch::Device = tch::Device::Cpu;
/// What a process of this binary is to play, and as which rank.
const PART: &str = "VOLTAIC_TEST_PART";
const RANK: &str = "VOLTAIC_TEST_RANK";
const RANKS: usize = 3;

fn stand_in(api: CollectiveApi) -> &'static Path {
    static MADE: OnceLock<[PathBuf; 2]> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("collectives");
        std::fs::create_dir_all(&folder).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/collectives/library.c");
        [("libnccl.so.2", "-DNCCL"), ("libhcl.so", "-DHCCL")].map(|(name, define)| {
            // each process of this binary makes its own, so that none is loaded half written
            let library = folder.join(format!("{}-{name}", std::process::id()));
            compile("cc", &[define], &source, &library);
            library
        })
    });
    &made[usize::from(api == CollectiveApi::Hccl)]
}

/// Runs `body` as each of the ranks, which get the id of the communicator from the first one.
fn as_ranks(
    test: &str,
    part: &str,
    env: &[(&str, &str)],
    body: impl Fn(usize, Backend),
) -> Option<Vec<String>> {
    let api = if part.contains("hccl") { CollectiveApi::Hccl } else { CollectiveApi::Nccl };
    if std::env::var(PART).is_ok_and(|played| played == part) {
        let rank: usize = std::env::var(RANK).unwrap().parse().unwrap();
        let path = PathBuf::from(std::env::var_os("STAND_IN").unwrap());
        let library = CollectiveLibrary::open(api, &[path]).unwrap();
        let mut line = String::new();
        if rank == 0 {
            line = library.unique_id().unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
            println!("\nid {line}");
        } else {
            std::io::stdin().read_line(&mut line).unwrap();
        }
        let digits = line.trim().as_bytes().chunks(2);
        let id: Vec<u8> =
            digits.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect();
        let seat = Seat { rank, size: RANKS, device: Device::Cpu, timeout: Duration::from_secs(1) };
        body(rank, library.join(&id, seat).unwrap());
        return None;
    }
    let start = |rank: usize| -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(PART, part);
        command.env(RANK, rank.to_string()).env("STAND_IN", stand_in(api)).env("OMP_NUM_THREADS", "1");
        command.envs(env.iter().copied());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut ranks: Vec<Child> = (0..RANKS).map(start).collect();
    let mut lines = BufReader::new(ranks[0].stdout.take().unwrap()).lines().map_while(Result::ok);
    let id = lines.find_map(|line| line.strip_prefix("id ").map(str::to_owned)).unwrap();
    for rank in &mut ranks[1..] {
        let mut stdin: ChildStdin = rank.stdin.take().unwrap();
        writeln!(stdin, "{id}").unwrap();
    }
    let first: String = lines.map(|line| line + "\n").collect();
    let finish = |(rank, child): (usize, Child)| {
        let output = child.wait_with_output().unwrap();
        let own = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let text = if rank == 0 { format!("{first}{errors}") } else { format!("{own}{errors}") };
        assert!(output.status.success(), "rank {rank}: {text}");
        text
    };
    Some(ranks.into_iter().enumerate().map(finish).collect())
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.to_kind(Kind::Float).flatten(0, -1)).unwrap()
}

/// Operations that give each rank something else.
fn exchange_parts(rank: usize, backend: &Backend) {
    let own = || Tensor::from_slice(&[rank as f32, rank as f32 + 1.0]);
    let sum = own();
    backend.reduce(&sum, 1, ReduceOp::Sum).unwrap().wait().unwrap();
    if rank == 1 {
        assert_eq!(floats(&sum), [3.0, 6.0]);
    }
    let product = Tensor::from_slice(&[rank as f32 + 2.0]);
    backend.all_reduce(&product, ReduceOp::Product).unwrap().wait().unwrap();
    assert_eq!(floats(&product), [24.0]);
    // rows of 3 bytes, which are not whole words
    let row = |value: usize| Tensor::from_slice(&[value as u8; 3]);
    let stacked = Tensor::zeros([RANKS as i64, 3], (Kind::Uint8, CPU));
    backend.gather(&row(rank + 4), &stacked, 1).unwrap().wait().unwrap();
    let expected = if rank == 1 { [[4.0; 3], [5.0; 3], [6.0; 3]].concat() } else { vec![0.0; 9] };
    assert_eq!(floats(&stacked), expected);
    let part = row(0);
    let rows = Tensor::stack(&[row(7), row(8), row(9)], 0);
    backend.scatter(&rows, &part, 2).unwrap().wait().unwrap();
    assert_eq!(floats(&part), [rank as f32 + 7.0; 3]);
    // rank r sends i + 1 rows to rank i, none to itself
    let splits: Vec<i64> = (0..RANKS).map(|i| if i == rank { 0 } else { i as i64 + 1 }).collect();
    let received: Vec<i64> = (0..RANKS).map(|i| if i == rank { 0 } else { rank as i64 + 1 }).collect();
    let sent = Tensor::full([splits.iter().sum(), 3], rank as i64, (Kind::Uint8, CPU));
    let all = Tensor::zeros([received.iter().sum(), 3], (Kind::Uint8, CPU));
    backend.all_to_all(&sent, &splits, &all, &received).unwrap().wait().unwrap();
    let others = (0..RANKS).filter(|&other| other != rank);
    let expected: Vec<f32> = others.flat_map(|other| vec![other as f32; 3 * (rank + 1)]).collect();
    assert_eq!(floats(&all), expected);
    let sent = Tensor::arange(3, (Kind::Float, CPU)) + rank as f64 * 10.0;
    let all = Tensor::zeros([3], (Kind::Float, CPU));
    backend.all_to_all(&sent, &[1; 3], &all, &[1; 3]).unwrap().wait().unwrap();
    assert_eq!(floats(&all), [0.0, 10.0, 20.0].map(|first| first + rank as f32));
    assert!(backend.all_to_all(&sent, &[1; 2], &all, &[1; 3]).is_err());
}

/// All operations, with values that depend on the rank.
fn exchange(rank: usize, backend: &Backend) {
    let own = || Tensor::from_slice(&[rank as f32, rank as f32 + 1.0]);
    for (op, expected) in [
        (ReduceOp::Sum, [3.0, 6.0]),
        (ReduceOp::Avg, [1.0, 2.0]),
        (ReduceOp::Min, [0.0, 1.0]),
        (ReduceOp::Max, [2.0, 3.0]),
    ] {
        let tensor = own();
        backend.all_reduce(&tensor, op).unwrap().wait().unwrap();
        assert_eq!(floats(&tensor), expected, "{op:?}");
    }
    for kind in [Kind::BFloat16, Kind::Int] {
        let tensor = own().to_kind(kind);
        backend.all_reduce(&tensor, ReduceOp::Sum).unwrap().wait().unwrap();
        assert_eq!(floats(&tensor), [3.0, 6.0], "{kind:?}");
    }
    // data of any dtype and size is moved: here 5 bytes, 24 bytes, and more than the stand-in takes at once
    let bytes = Tensor::from_slice(&[rank as u8; 5]);
    backend.broadcast(&bytes, 2).unwrap().wait().unwrap();
    assert_eq!(floats(&bytes), [2.0; 5]);
    let gathered = Tensor::zeros([15], (Kind::Uint8, CPU));
    backend.all_gather(&Tensor::from_slice(&[rank as u8; 5]), &gathered).unwrap().wait().unwrap();
    assert_eq!(floats(&gathered), [[0.0; 5], [1.0; 5], [2.0; 5]].concat());
    let all = Tensor::zeros([RANKS as i64], (Kind::Int64, CPU));
    backend.all_gather(&Tensor::from_slice(&[rank as i64 - 7]), &all).unwrap().wait().unwrap();
    assert_eq!(floats(&all), [-7.0, -6.0, -5.0]);
    let large = Tensor::full([700_001], rank as f64, (Kind::Float, CPU));
    backend.all_reduce(&large, ReduceOp::Sum).unwrap().wait().unwrap();
    assert!(large.equal(&Tensor::full([700_001], 3.0, (Kind::Float, CPU))));
    let part = Tensor::zeros([2], (Kind::Float, CPU));
    let input = Tensor::arange(6, (Kind::Float, CPU)) + rank as f64;
    backend.reduce_scatter(&input, &part, ReduceOp::Sum).unwrap().wait().unwrap();
    let first = 3.0 * 2.0 * rank as f32 + 3.0;
    assert_eq!(floats(&part), [first, first + 3.0]);
    exchange_parts(rank, backend);
    match rank {
        0 => backend.send(&own(), 1).unwrap().wait().unwrap(),
        1 => {
            let received = own();
            backend.recv(&received, 0).unwrap().wait().unwrap();
            assert_eq!(floats(&received), [0.0, 1.0]);
        }
        _ => {}
    }
    backend.barrier().unwrap().wait().unwrap();
    // several under way at once
    let tensors: Vec<Tensor> = (0..4).map(|i| own() * f64::from(i)).collect();
    let works: Vec<_> = tensors.iter().map(|t| backend.all_reduce(t, ReduceOp::Sum).unwrap()).collect();
    works.into_iter().for_each(|work| work.wait().unwrap());
    assert_eq!(floats(&tensors[3]), [9.0, 18.0]);
    let x = Tensor::from_slice(&[1.0_f32 + rank as f32]).set_requires_grad(true);
    let y = backend.differentiable_sum(&x).unwrap();
    assert_eq!(floats(&y), [6.0]);
    (y.square() * (rank as f64 + 1.0)).backward();
    assert_eq!(floats(&x.grad()), [72.0], "6 ranks' weights of 2 y");
}

#[test]
fn nccl_exchanges_tensors() {
    as_ranks("nccl_exchanges_tensors", "nccl", &[], |rank, backend| {
        exchange(rank, &backend);
        let doubles = Tensor::from_slice(&[rank as f64]);
        backend.all_reduce(&doubles, ReduceOp::Avg).unwrap().wait().unwrap();
        assert_eq!(floats(&doubles), [1.0]);
    });
}

#[test]
fn hccl_exchanges_tensors() {
    as_ranks("hccl_exchanges_tensors", "hccl", &[], |rank, backend| {
        exchange(rank, &backend);
        let error = backend.all_reduce(&Tensor::from_slice(&[1.0_f64]), ReduceOp::Sum).unwrap_err();
        assert!(error.message.contains("hccl reduces float32, bfloat16, float16 and int32"), "{error}");
        let error = backend.all_reduce(&Tensor::from_slice(&[1_i32]), ReduceOp::Avg).unwrap_err();
        assert!(error.message.contains("not a whole number"), "{error}");
    });
}

#[test]
fn an_operation_that_hangs_or_fails_breaks_the_communicator() {
    let test = "an_operation_that_hangs_or_fails_breaks_the_communicator";
    for (part, variables, expected) in [
        ("hccl hangs", &[("STUB_STUCK_AFTER", "1")][..], "timed out after 1000 ms"),
        (
            "hccl fails",
            &[("STUB_STUCK_AFTER", "1"), ("STUB_ASYNC_ERROR", "1")],
            "an operation of hccl: stub: a rank is gone",
        ),
    ] {
        if std::env::var(PART).is_ok_and(|played| played != part) {
            continue; // a rank of the other case
        }
        let texts = as_ranks(test, part, variables, |_, backend| {
            let tensor = Tensor::zeros([2], (Kind::Float, CPU));
            backend.all_reduce(&tensor, ReduceOp::Sum).unwrap().wait().unwrap();
            for expected in [expected, "an operation before this one has failed"] {
                let error = backend.all_reduce(&tensor, ReduceOp::Sum).unwrap_err();
                assert!(error.message.contains(expected), "{error}");
            }
        });
        let Some(texts) = texts else { return };
        assert!(texts[0].contains("stub: rank 0 aborts"), "{texts:?}");
    }
}

#[test]
fn what_is_missing_is_named() {
    let error = CollectiveLibrary::open(CollectiveApi::Nccl, &["/nowhere/libnccl.so.2"]).unwrap_err();
    assert!(error.contains("/nowhere/libnccl.so.2"), "{error}");
    let error = CollectiveLibrary::open(CollectiveApi::Nccl, &[stand_in(CollectiveApi::Hccl)]).unwrap_err();
    assert!(error.contains("libhcl.so has no ncclGetUniqueId"), "{error}");
}

//! What is compared: workloads and peers, one line each.

use serde::Serialize;

/// A network, its batch, and how long it is trained in one process.
#[derive(Debug)]
pub struct Workload {
    pub name: &'static str,
    /// What is trained, for the reader.
    pub what: &'static str,
    /// On the CPU; none if it is too much for it.
    pub on_cpu: Option<Steps>,
    pub on_cuda: Steps,
    /// Samples or tokens of one step.
    pub items: usize,
    pub item: &'static str,
    /// Floating point operations of one step that no implementation can avoid.
    pub flops: fn() -> f64,
    /// Whom voltaic should be faster than.
    pub rival: Rival,
    /// How many times.
    pub target: f64,
    /// The same with both in bfloat16.
    pub bf16_target: f64,
}

/// How many steps a process trains.
#[derive(Debug, Clone, Copy)]
pub struct Steps {
    pub warmup: usize,
    pub timed: usize,
}

const fn steps(warmup: usize, timed: usize) -> Steps {
    Steps { warmup, timed }
}

/// A peer that voltaic is measured against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rival {
    /// Lightning without files and bar.
    Baseline,
    /// The fastest of all.
    Best,
}

pub const WORKLOADS: [Workload; 6] = [
    Workload {
        name: "mlp",
        what: "784-256-10, batch 64, AdamW",
        on_cpu: Some(steps(30, 400)),
        on_cuda: steps(50, 400),
        items: 64,
        item: "samples",
        flops: || 2.0 * linear(64, 784, 256) + 3.0 * linear(64, 256, 10),
        rival: Rival::Baseline,
        target: 2.0,
        bf16_target: 2.0,
    },
    Workload {
        name: "cnn",
        what: "conv 32, conv 64, max-pool, dropout, fc 128 on 28 x 28, batch 64, Adam",
        on_cpu: Some(steps(4, 24)),
        on_cuda: steps(20, 200),
        items: 64,
        item: "samples",
        flops: cnn_flops,
        rival: Rival::Baseline,
        target: 1.25,
        bf16_target: 1.25,
    },
    Workload {
        name: "resnet18",
        what: "ResNet-18 on 32 x 32, batch 32, SGD with momentum",
        on_cpu: Some(steps(2, 6)),
        on_cuda: steps(20, 100),
        items: 32,
        item: "samples",
        flops: resnet18_flops,
        rival: Rival::Best,
        target: 1.0,
        bf16_target: 1.15,
    },
    Workload {
        name: "gpt-tiny",
        what: "GPT of 4 layers, 4 heads, 128 channels, context 64, batch 12, AdamW",
        on_cpu: Some(steps(5, 40)),
        on_cuda: steps(20, 200),
        items: 12 * 64,
        item: "tokens",
        flops: || gpt_flops(12, 64, 4, 128, 256),
        rival: Rival::Baseline,
        target: 1.25,
        bf16_target: 1.25,
    },
    Workload {
        name: "gpt-mini",
        what: "GPT of 6 layers, 6 heads, 384 channels, context 256, batch 4, AdamW",
        on_cpu: Some(steps(2, 6)),
        on_cuda: steps(20, 100),
        items: 4 * 256,
        item: "tokens",
        flops: || gpt_flops(4, 256, 6, 384, 256),
        rival: Rival::Best,
        target: 1.15,
        bf16_target: 1.3,
    },
    Workload {
        name: "gpt2",
        what: "GPT of 12 layers, 12 heads, 768 channels, context 1024, 50304 tokens, batch 8, AdamW",
        on_cpu: None,
        on_cuda: steps(10, 30),
        items: 8 * 1024,
        item: "tokens",
        flops: || gpt_flops(8, 1024, 12, 768, 50304),
        rival: Rival::Baseline,
        target: CUDA_TARGET,
        bf16_target: CUDA_TARGET,
    },
];

/// How many times faster than Lightning voltaic should be on a GPU: both run libtorch's kernels there.
const CUDA_TARGET: f64 = 1.0;
/// Steps between two waits for a GPU.
const CUDA_BLOCK: usize = 10;

/// The peer that all others are compared with.
pub const BASELINE: &str = "lightning";
/// voltaic as it should be judged: the trainer without files and bar, like the baseline.
pub const OURS: &str = "voltaic";
/// The same with `trainer.graph=step`.
pub const GRAPHS: &str = "voltaic-graphs";
/// With states divided among the processes: what part of voltaic's own speed by DDP each stage should have.
pub const SHARDED: [(&str, f64); 3] =
    [("voltaic-zero1", 0.95), ("voltaic-zero2", 0.95), ("voltaic-zero3", 0.85)];
/// What graphs are compared with.
pub const COMPILED: &str = "torch-compile";

/// The program that trains or generates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    Voltaic,
    Torch,
    TorchGenerate,
    LlamaCpp,
    Burn,
    Candle,
}

/// What the losses of a peer must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// Weights, batches and dropout masks are the baseline's, and so are the losses.
    Same,
    /// Weights and batches are the baseline's; dropout draws masks of its own, or numbers are rounded otherwise.
    OwnMasks,
    /// Weights and batches are drawn by another generator: only the shapes are the same.
    OwnDraw,
}

/// A way to train that is compared.
#[derive(Debug)]
pub struct Peer {
    pub name: &'static str,
    pub program: Program,
    /// How the program calls it.
    pub variant: &'static str,
    pub workloads: &'static [&'static str],
    pub work: Work,
    /// It divides states among processes, of which it needs more than one.
    pub shards: bool,
}

const ALL: &[&str] = &["mlp", "cnn", "resnet18", "gpt-tiny", "gpt-mini", "gpt2"];
/// Peers that train on a GPU, too.
const ON_CUDA: [&str; 8] = [
    OURS,
    "voltaic-defaults",
    BASELINE,
    "lightning-defaults",
    "pytorch",
    "pytorch-fused",
    "pytorch-channels-last",
    COMPILED,
];
const GPTS: &[&str] = &["gpt-tiny", "gpt-mini", "gpt2"];
const SMALL: &[&str] = &["mlp", "cnn"];

pub const PEERS: [Peer; 25] = [
    peer("voltaic", Program::Voltaic, "bare", ALL, Work::Same),
    peer("voltaic-defaults", Program::Voltaic, "defaults", ALL, Work::Same),
    peer("voltaic-hpu", Program::Voltaic, "hpu", ALL, Work::Same),
    peer("voltaic-hpu-graphs", Program::Voltaic, "hpu-graphs", ALL, Work::Same),
    peer(GRAPHS, Program::Voltaic, "graphs", ALL, Work::Same),
    // passes over the same graph
    peer("voltaic-compiled", Program::Voltaic, "compiled", ALL, Work::Same),
    // products in float8; activations in float32 by precision=fp8, in bfloat16 by a region within bf16-mixed
    peer("voltaic-fp8", Program::Voltaic, "fp8", GPTS, Work::OwnMasks),
    peer("lightning", Program::Torch, "lightning", ALL, Work::Same),
    peer("lightning-defaults", Program::Torch, "lightning-defaults", ALL, Work::Same),
    peer("pytorch", Program::Torch, "plain", ALL, Work::Same),
    peer("pytorch-fused", Program::Torch, "plain-fused", ALL, Work::Same),
    // the layout that voltaic's own have
    peer("pytorch-channels-last", Program::Torch, "plain-channels-last", &["cnn", "resnet18"], Work::Same),
    peer(COMPILED, Program::Torch, "compile", ALL, Work::OwnMasks),
    // each block is computed again in backward
    peer("voltaic-checkpointed", Program::Voltaic, "checkpointed", GPTS, Work::Same),
    peer("pytorch-checkpointed", Program::Torch, "plain-checkpointed", GPTS, Work::Same),
    peer("burn", Program::Burn, "plain", SMALL, Work::OwnDraw),
    peer("candle", Program::Candle, "plain", SMALL, Work::OwnDraw),
    sharded("voltaic-zero1", Program::Voltaic, "zero1"),
    sharded("voltaic-zero2", Program::Voltaic, "zero2"),
    sharded("voltaic-zero3", Program::Voltaic, "zero3"),
    sharded("fully-shard", Program::Torch, "fully-shard"),
    sharded("fully-shard-kept", Program::Torch, "fully-shard-kept"),
    sharded("deepspeed-1", Program::Torch, "deepspeed-1"),
    sharded("deepspeed-2", Program::Torch, "deepspeed-2"),
    sharded("deepspeed-3", Program::Torch, "deepspeed-3"),
];

const fn peer(
    name: &'static str,
    program: Program,
    variant: &'static str,
    workloads: &'static [&'static str],
    work: Work,
) -> Peer {
    Peer { name, program, variant, workloads, work, shards: false }
}

const fn sharded(name: &'static str, program: Program, variant: &'static str) -> Peer {
    Peer { name, program, variant, workloads: &["cnn", "gpt-mini"], work: Work::Same, shards: true }
}

/// What trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Hardware {
    Cpu,
    Cuda,
}

impl Hardware {
    /// As `trainer.accelerator` has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }

    /// Steps between two waits for the device.
    pub fn block(self) -> usize {
        match self {
            Self::Cpu => 1,
            Self::Cuda => CUDA_BLOCK,
        }
    }
}

/// Number format of the operators; weights are in float32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Precision {
    #[serde(rename = "32-true")]
    Fp32,
    #[serde(rename = "bf16-mixed")]
    Bf16,
}

pub const HARDWARE: [Hardware; 2] = [Hardware::Cpu, Hardware::Cuda];
pub const PRECISIONS: [Precision; 2] = [Precision::Fp32, Precision::Bf16];

impl Precision {
    /// As `trainer.precision` has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "32-true",
            Self::Bf16 => "bf16-mixed",
        }
    }
}

/// Whether glibc may give freed memory back to the system after each step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Malloc {
    /// It keeps what it has, for all peers alike.
    Held,
    /// Its own settings.
    Stock,
}

/// A table: peers side by side under equal conditions.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub workload: &'static Workload,
    pub precision: Precision,
    pub num_threads: usize,
    pub malloc: Malloc,
    /// Processes that train together over Gloo, each with that many threads and batches of its own.
    pub num_processes: usize,
    pub hardware: Hardware,
}

/// Workloads that two processes train, too, and how many times faster than Lightning voltaic should be then.
const IN_TWO_PROCESSES: [(&str, f64); 3] = [("mlp", 1.3), ("cnn", 1.3), ("gpt-mini", 1.15)];

impl Case {
    pub fn title(&self) -> String {
        let threads =
            if self.num_threads == 1 { "1 thread" } else { &format!("{} threads", self.num_threads) };
        let processes = if self.num_processes == 1 { "" } else { ", 2 processes" };
        let malloc = if self.malloc == Malloc::Stock { ", stock malloc" } else { "" };
        let precision = if self.precision == Precision::Bf16 { " bf16-mixed" } else { "" };
        let place = if self.hardware == Hardware::Cuda { "cuda" } else { threads };
        format!("{}{precision}{processes}, {place}{malloc}", self.workload.name)
    }

    /// How many steps a peer trains in a process. A step is captured when it comes for the fourth and fifth time.
    pub fn steps(&self, peer: &Peer) -> Option<Steps> {
        let steps = match self.hardware {
            Hardware::Cpu => self.workload.on_cpu?,
            Hardware::Cuda => self.workload.on_cuda,
        };
        let warmup = if peer.variant.ends_with("graphs") { steps.warmup.max(6) } else { steps.warmup };
        Some(Steps { warmup, ..steps })
    }

    /// Samples or tokens of one step of all processes.
    pub fn items(&self) -> usize {
        self.workload.items * self.num_processes
    }

    /// Floating point operations of one step of all processes.
    pub fn flops(&self) -> f64 {
        (self.workload.flops)() * self.num_processes as f64
    }

    /// How many times faster than its rival voltaic should be.
    pub fn target(&self) -> f64 {
        let together = IN_TWO_PROCESSES.iter().find(|(name, _)| *name == self.workload.name);
        if self.hardware == Hardware::Cuda {
            return CUDA_TARGET;
        }
        match (self.precision, together) {
            (_, Some((_, target))) if self.num_processes > 1 => *target,
            (Precision::Bf16, _) => self.workload.bf16_target,
            (Precision::Fp32, _) => self.workload.target,
        }
    }

    pub fn takes(&self, peer: &Peer) -> bool {
        // of the others, the benchmark trains in float32 only
        let has_bf16 = matches!(peer.program, Program::Voltaic | Program::Torch);
        let has_ranks = match self.num_processes {
            1 => !peer.shards,
            _ => peer.shards || [OURS, BASELINE].contains(&peer.name),
        };
        let has_hardware = self.hardware == Hardware::Cpu || ON_CUDA.contains(&peer.name);
        has_ranks
            && has_hardware
            && peer.workloads.contains(&self.workload.name)
            && (has_bf16 || self.precision == Precision::Fp32)
    }
}

/// All cases of some workloads; stock malloc only where it tells most, on `mlp` in float32 with the first thread count,
/// and two processes with one thread each, in float32. On a GPU one case for each workload and precision.
pub fn cases(
    hardware: Hardware,
    workloads: &[&'static Workload],
    precisions: &[&Precision],
    threads: &[usize],
) -> Vec<Case> {
    let mut cases = Vec::new();
    for &workload in workloads {
        for &&precision in precisions {
            for &num_threads in threads {
                let malloc = Malloc::Held;
                let case = Case { workload, precision, num_threads, malloc, num_processes: 1, hardware };
                if hardware == Hardware::Cuda || workload.on_cpu.is_some() {
                    cases.push(case);
                }
                if hardware == Hardware::Cuda {
                    continue;
                }
                let trains_together = IN_TWO_PROCESSES.iter().any(|(name, _)| *name == workload.name);
                if trains_together && precision == Precision::Fp32 && num_threads == 1 {
                    cases.push(Case { num_processes: 2, ..case });
                }
                if workload.name == "mlp" && precision == Precision::Fp32 && num_threads == threads[0] {
                    cases.push(Case { malloc: Malloc::Stock, ..case });
                }
            }
        }
    }
    cases
}

/// Operations of the forward pass of a linear layer. Backward takes the same twice: for the weights and for the
/// input, of which a first layer needs none.
fn linear(rows: usize, from: usize, to: usize) -> f64 {
    2.0 * rows as f64 * from as f64 * to as f64
}

/// The same of a convolution with square kernel and output.
fn conv(batch: usize, side: usize, kernel: usize, from: usize, to: usize) -> f64 {
    linear(batch * side * side, kernel * kernel * from, to)
}

fn cnn_flops() -> f64 {
    let rest = conv(64, 24, 3, 32, 64) + linear(64, 64 * 12 * 12, 128) + linear(64, 128, 10);
    2.0 * conv(64, 26, 3, 1, 32) + 3.0 * rest
}

fn resnet18_flops() -> f64 {
    let mut forward = linear(32, 512, 10);
    for (stage, channels) in [64, 128, 256, 512].into_iter().enumerate() {
        let side = 32 >> stage;
        let from = if stage == 0 { 64 } else { channels / 2 };
        forward += conv(32, side, 3, from, channels) + 3.0 * conv(32, side, 3, channels, channels);
        if stage > 0 {
            forward += conv(32, side, 1, from, channels); // the shortcut
        }
    }
    2.0 * conv(32, 32, 3, 3, 64) + 3.0 * forward
}

fn gpt_flops(batch: usize, time: usize, layers: usize, channels: usize, tokens: usize) -> f64 {
    let rows = batch * time;
    let matrices = linear(rows, channels, 12 * channels);
    let attention = linear(rows, time, channels); // scores and their sums of values, half of each masked
    3.0 * (layers as f64 * (matrices + attention) + linear(rows, channels, tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flops_agree_with_the_usual_estimates() {
        let gflops = |name| (WORKLOADS.iter().find(|w| w.name == name).unwrap().flops)() / 1e9;
        // ResNet-18 for CIFAR: 0.556 G multiply-adds per picture, 6 operations each in training
        assert!((gflops("resnet18") / (32.0 * 0.556 * 6.0) - 1.0).abs() < 0.01, "{}", gflops("resnet18"));
        // GPT: 6 per parameter and token, and the attention
        assert!(
            (gflops("gpt-mini") / (6.0 * 10.7e6 * 1024.0 / 1e9) - 1.0).abs() < 0.08,
            "{}",
            gflops("gpt-mini")
        );
        assert!((gflops("mlp") - 0.0523).abs() < 0.001, "{}", gflops("mlp"));
    }

    #[test]
    fn two_processes_have_cases_of_their_own() {
        let workloads: Vec<&Workload> = WORKLOADS.iter().collect();
        let together = |threads: &[usize]| -> Vec<String> {
            let cases = cases(Hardware::Cpu, &workloads, &[&Precision::Fp32, &Precision::Bf16], threads);
            cases.iter().filter(|case| case.num_processes > 1).map(Case::title).collect()
        };
        let titles =
            ["mlp, 2 processes, 1 thread", "cnn, 2 processes, 1 thread", "gpt-mini, 2 processes, 1 thread"];
        assert_eq!(together(&[1, 2]), titles);
        assert!(together(&[2]).is_empty());
        let case = cases(Hardware::Cpu, &workloads, &[&Precision::Fp32], &[1])[1];
        assert_eq!((case.items(), case.flops() / (case.workload.flops)(), case.target()), (128, 2.0, 1.3));
        let num_peers = |case: Case| PEERS.iter().filter(|peer| case.takes(peer)).count();
        assert_eq!(num_peers(case), 2);
        let cnn = WORKLOADS.iter().find(|workload| workload.name == "cnn").unwrap();
        let sharded = PEERS.iter().filter(|peer| peer.shards).count();
        assert_eq!(num_peers(Case { workload: cnn, ..case }), 2 + sharded);
        let alone = Case { workload: cnn, num_processes: 1, ..case };
        assert!(!PEERS.iter().any(|peer| peer.shards && alone.takes(peer)));
    }

    #[test]
    fn a_gpu_has_whole_blocks_and_peers_that_know_it() {
        let workloads: Vec<&Workload> = WORKLOADS.iter().collect();
        let cases = cases(Hardware::Cuda, &workloads, &[&Precision::Fp32, &Precision::Bf16], &[1]);
        assert_eq!(cases.len(), 2 * WORKLOADS.len());
        assert_eq!(cases[1].title(), "mlp bf16-mixed, cuda");
        for case in &cases {
            let peers: Vec<&Peer> = PEERS.iter().filter(|peer| case.takes(peer)).collect();
            assert!(
                [OURS, BASELINE, COMPILED].iter().all(|name| peers.iter().any(|peer| peer.name == *name))
            );
            for peer in peers {
                let steps = case.steps(peer).unwrap();
                assert!(steps.warmup % CUDA_BLOCK == 0 && steps.timed % CUDA_BLOCK == 0, "{}", peer.name);
                assert!(matches!(peer.program, Program::Voltaic | Program::Torch), "{}", peer.name);
            }
        }
        assert!(ON_CUDA.iter().all(|name| PEERS.iter().any(|peer| peer.name == *name)));
    }

    #[test]
    fn every_peer_has_known_workloads_and_the_baseline_is_there() {
        assert!(PEERS.iter().flat_map(|p| p.workloads).all(|name| WORKLOADS.iter().any(|w| w.name == *name)));
        assert!(SHARDED.iter().all(|(name, _)| PEERS.iter().any(|peer| peer.name == *name && peer.shards)));
        for name in [OURS, BASELINE] {
            assert_eq!(PEERS.iter().find(|p| p.name == name).unwrap().workloads, ALL);
        }
    }
}

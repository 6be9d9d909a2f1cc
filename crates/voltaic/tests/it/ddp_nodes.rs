//! Ranks on several nodes, and those that other launchers start.

use std::process::{Command, Stdio};

use tempfile::TempDir;
use voltaic::Module;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::nn::{BatchNorm1d, Forward, Linear, ModuleExt};
use voltaic::optim::Sgd;
use voltaic::{Kind, Tensor};

use crate::ddp::{
    FOLDER, Net, alone, assert_same, builder, finish, folder_of_parent, loaders, run_ranks, weights,
};
use crate::ddp_unused::of_pytorch;
use crate::distributed::free_port;
use crate::probe::{own_process, plays, silent, text_of};

#[test]
fn two_nodes_train_through_the_environment() {
    if plays("node") {
        let folder = folder_of_parent();
        let mut trainer = builder(&folder).devices(1).num_nodes(2_u64).build().unwrap();
        assert_eq!((trainer.strategy(), trainer.world().node_rank), ("ddp", trainer.world().rank));
        let mut net = Net::new();
        trainer.fit(&mut net, &mut loaders(None)).unwrap();
        return finish(&trainer, &net, &folder);
    }
    let (_kept, expected, ..) = alone(2, 1);
    let folder = TempDir::new().unwrap();
    let port = free_port();
    let nodes: Vec<_> = (0..2)
        .map(|node_rank| {
            let mut command = own_process("node");
            command.env(FOLDER, folder.path()).env("MASTER_PORT", port.to_string());
            command.env("NODE_RANK", node_rank.to_string());
            // node 0 is the master, and WORLD_SIZE is only checked
            match node_rank {
                0 => command.env("WORLD_SIZE", "2"),
                _ => command.env("MASTER_ADDR", "127.0.0.1"),
            };
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for node in nodes {
        text_of(&node.wait_with_output().unwrap());
    }
    assert_same(&weights(folder.path()), &expected);
}

/// Variables that a launcher gives the two processes that it starts, by rank.
fn launchers(folder: &std::path::Path) -> Vec<(&'static str, String)> {
    let hosts = folder.join("hosts");
    std::fs::write(&hosts, "launch\nlocalhost\nlocalhost\n").unwrap();
    let lsf = format!("LSB_JOBID=7 LSB_DJOB_RANKFILE={} JSM_NAMESPACE_SIZE=2", hosts.display());
    vec![
        ("Slurm", "SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2 SLURM_NNODES=1 SLURM_JOB_NAME=train SLURM_NODELIST=localhost \
                   SLURM_NODEID=0 SLURM_PROCID=# SLURM_LOCALID=#".to_owned()),
        ("LSF", format!("{lsf} JSM_NAMESPACE_RANK=# JSM_NAMESPACE_LOCAL_RANK=#")),
        ("Open MPI", "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_RANK=# \
                      OMPI_COMM_WORLD_LOCAL_RANK=#".to_owned()),
        ("Intel MPI", "PMI_SIZE=2 MPI_LOCALNRANKS=2 PMI_RANK=# MPI_LOCALRANKID=#".to_owned()),
        ("Kubeflow", "WORLD_SIZE=2 MASTER_ADDR=localhost RANK=#".to_owned()),
    ]
}

#[test]
fn ranks_that_others_start_find_each_other() {
    if plays("started") {
        let is_pod = std::env::var_os("RANK").is_some();
        let builder = builder(&folder_of_parent()).devices(if is_pod { 1 } else { 2 });
        let mut trainer = builder.num_nodes(if is_pod { 2_u64 } else { 1 }).build().unwrap();
        let mut net = Net::new();
        trainer.fit(&mut net, &mut loaders(None)).unwrap();
        return finish(&trainer, &net, &folder_of_parent());
    }
    let (_kept, expected, ..) = alone(2, 1);
    let rank_files = TempDir::new().unwrap();
    for (launcher, variables) in launchers(rank_files.path()) {
        let folder = TempDir::new().unwrap();
        let port = free_port().to_string();
        let start = |rank: &str| {
            let mut command = own_process("started");
            for (name, value) in variables.split_whitespace().filter_map(|pair| pair.split_once('=')) {
                command.env(name, value.replace('#', rank));
            }
            command.env(FOLDER, folder.path()).env("MASTER_PORT", &port);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        for rank in ["0", "1"].map(start) {
            text_of(&rank.wait_with_output().unwrap());
        }
        println!("{launcher}");
        assert_same(&weights(folder.path()), &expected);
    }
}

#[test]
fn contradictions_name_the_variable() {
    if plays("contradiction") {
        let error =
            builder(&folder_of_parent()).devices(2).num_nodes(2_u64).build().err().expect("a contradiction");
        println!("refused: {error}");
        return;
    }
    let folder = TempDir::new().unwrap();
    let cases: [(&[(&str, &str)], &str); 7] = [
        (
            &[("WORLD_SIZE", "3")],
            "WORLD_SIZE: 3, but trainer.devices=2 x trainer.num_nodes=2 is 4; make them equal",
        ),
        (&[], "NODE_RANK: not set with trainer.num_nodes=2"),
        (&[("NODE_RANK", "2")], "NODE_RANK: 2 of trainer.num_nodes=2"),
        (&[("NODE_RANK", "0")], "MASTER_PORT: not set with trainer.num_nodes=2"),
        (&[("NODE_RANK", "1"), ("MASTER_PORT", "1")], "MASTER_ADDR: not set with trainer.num_nodes=2"),
        (&[("NODE_RANK", "x")], "NODE_RANK: `x` is not a number"),
        (
            &[
                ("LOCAL_RANK", "1"),
                ("NODE_RANK", "1"),
                ("RANK", "2"),
                ("MASTER_ADDR", "a"),
                ("MASTER_PORT", "1"),
            ],
            "RANK: 2, but NODE_RANK=1 x trainer.devices=2 + LOCAL_RANK=1 is 3",
        ),
    ];
    for (variables, expected) in cases {
        let mut command = own_process("contradiction");
        command.env(FOLDER, folder.path()).envs(variables.iter().copied());
        let text = text_of(&command.output().unwrap());
        assert!(text.contains(expected), "{variables:?}: {text}");
    }
}

#[test]
fn one_of_several_processes_does_not_train_by_itself_unless_told() {
    if plays("alone") {
        let of = |strategy: &str, max_restarts: u64| {
            let folder = folder_of_parent();
            let builder = builder(&folder).devices(1).strategy(strategy).max_restarts(max_restarts);
            builder.build().err().map_or_else(|| "built".to_owned(), |error| error.to_string())
        };
        println!("\nauto: {}", of("auto", 0));
        println!("single_device: {}", of("single_device", 0));
        println!("restarts: {}", of("single_device", 1));
        return;
    }
    let torchrun: &[(&str, &str)] = &[
        ("TORCHELASTIC_RUN_ID", "x"),
        ("RANK", "1"),
        ("LOCAL_RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
    ];
    let mpi: &[(&str, &str)] = &[("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_RANK", "0")];
    for (variables, name) in [
        (torchrun, "WORLD_SIZE"),
        (&[("WORLD_SIZE", "2"), ("NODE_RANK", "0")], "WORLD_SIZE"),
        (mpi, "OMPI_COMM_WORLD_SIZE"),
    ] {
        let folder = TempDir::new().unwrap();
        let mut command = own_process("alone");
        command.env(FOLDER, folder.path()).envs(variables.iter().copied());
        let text = text_of(&command.output().unwrap());
        let expected =
            format!("auto: {name}: 2 ranks, but trainer.devices and trainer.num_nodes ask for one");
        assert_contains!(&text, &expected, "single_device: built");
    }
    let folder = TempDir::new().unwrap();
    let mut command = own_process("alone");
    command.env(FOLDER, folder.path()).envs(torchrun.iter().copied()).env("MASTER_PORT", "1");
    let text = text_of(&command.output().unwrap());
    assert!(text.contains("restarts: trainer.max_restarts: set, but torchrun starts the ranks"), "{text}");
}

#[test]
fn nodes_with_other_numbers_of_devices_are_both_told_at_once() {
    if plays("node") {
        let devices = if std::env::var("NODE_RANK").unwrap() == "0" { 2 } else { 1 };
        let built = builder(&folder_of_parent()).devices(devices).num_nodes(2_u64).build();
        eprintln!("refused: {}", built.err().unwrap());
        std::process::exit(3);
    }
    let folders = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    let port = free_port().to_string();
    let start = |(node, folder): (usize, &TempDir)| {
        let mut command = own_process("node");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port).env("NODE_RANK", node.to_string());
        command.env(FOLDER, folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    for node in folders.iter().enumerate().map(start).collect::<Vec<_>>() {
        let output = node.wait_with_output().unwrap();
        let shown = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(3), "{shown}");
        assert!(shown.contains("rank 0 expects 4 ranks, rank 1 (process"), "{shown}");
        assert!(shown.contains("expects 2; use the same trainer.devices"), "{shown}");
    }
}

#[test]
fn four_ranks_equal_one_process_up_to_the_order_of_sums() {
    if plays("four") {
        let folder = folder_of_parent();
        let mut trainer = builder(&folder).devices(4).strategy("ddp").build().unwrap();
        let mut net = Net::new();
        trainer.fit(&mut net, &mut loaders(None)).unwrap();
        return finish(&trainer, &net, &folder);
    }
    let (_kept, expected, ..) = alone(4, 1);
    let folder = TempDir::new().unwrap();
    run_ranks("four", folder.path());
    for ((name, own), (_, expected)) in weights(folder.path()).iter().zip(&expected) {
        // four float32 numbers are added in another order: each gradient is off by a few units in the last place,
        // relative to its largest summand, and AdamW divides by the gradient's own size
        assert!(own.allclose(expected, 1e-4, 1e-5, false), "{name}: {}", (own - expected).abs().max());
    }
}

/// A layer, batch normalisation, a layer.
#[derive(Module)]
struct Normed {
    first: Linear,
    norm: BatchNorm1d,
    second: Linear,
}

lightning_module!(Normed, Tensor, Sgd::new(0.1), |net, x, _| {
    let hidden = net.norm.forward(&net.first.forward(x)?)?;
    Ok(net.second.forward(&hidden.tanh())?.square().mean(Kind::Float))
});

fn train_normed(devices: i64, batch: usize, folder: &std::path::Path) {
    let net = Normed {
        first: Linear::new(3, 4).unwrap(),
        norm: BatchNorm1d::new(4).unwrap(),
        second: Linear::new(4, 2).unwrap(),
    };
    let wave = |size: &[i64], phase: f64| {
        let count: i64 = size.iter().product();
        (Tensor::arange(count, (Kind::Double, tch::Device::Cpu)) * 7.77 + phase)
            .sin()
            .to_kind(Kind::Float)
            .reshape(size)
    };
    for (number, parameter) in net.parameters().into_iter().enumerate() {
        parameter.set_data(&(wave(&parameter.size(), number as f64) + 0.5)).unwrap();
    }
    let train =
        DataLoader::new(TensorDataset::new(wave(&[24, 3], 2.0) * 3.0 + 5.0).unwrap()).batch_size(batch);
    let mut net = net;
    let builder = silent()
        .max_epochs(2)
        .devices(devices)
        .sync_batchnorm(true)
        .limit_val_batches(0)
        .default_root_dir(folder);
    let mut trainer = builder.build().unwrap();
    trainer.fit(&mut net, &mut Loaders::new().train(train.build().unwrap())).unwrap();
    if trainer.is_global_zero() {
        let weights = net.state_dict();
        voltaic::checkpoint::Checkpoint { weights, ..Default::default() }
            .save(&folder.join("end.ckpt"))
            .unwrap();
    }
}

#[test]
fn sync_batchnorm_equals_the_whole_batch_on_one_process() {
    if plays("normed") {
        return train_normed(2, 4, &folder_of_parent());
    }
    let (one, two) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    train_normed(1, 8, one.path());
    run_ranks("normed", two.path());
    let (expected, own) = (weights(one.path()), weights(two.path()));
    assert_eq!(own.len(), 9);
    for expected in [expected, of_pytorch("sync_batchnorm")] {
        for ((name, own), (_, expected)) in own.iter().zip(&expected) {
            // sums over the batch in another order
            let (own, expected) = (own.to_kind(Kind::Float), expected.to_kind(Kind::Float));
            assert!(own.allclose(&expected, 1e-4, 1e-5, false), "{name}: {own} {expected}");
        }
    }
}

/// Weights after a few steps of the recipe on two devices, started by the command line.
fn fit_recipe(accelerator: &str, strategy: &str) -> Vec<(String, Tensor)> {
    let folder = TempDir::new().unwrap();
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/mnist.yaml");
    let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
    command.args(["fit", "--config", recipe, "--trainer.devices", "2", "--trainer.strategy", strategy]);
    command.args(["--trainer.accelerator", accelerator, "--trainer.max_epochs=1", "--data.batch_size=8"]);
    command.args([
        "--trainer.limit_train_batches=4",
        "--trainer.limit_val_batches=2",
        "--data.num_workers=0",
    ]);
    let output = command.env("OMP_NUM_THREADS", "1").current_dir(folder.path()).output().unwrap();
    let text = text_of(&output);
    let path =
        text.lines().find_map(|line| line.strip_prefix("checkpoint")).unwrap_or_else(|| panic!("{text}"));
    assert_eq!(text.matches("checkpoint ").count(), 1, "rank 0 alone prints: {text}");
    assert!(
        folder.path().join("lightning_logs/version_0/metrics.csv").exists()
            && folder.path().join("rank_logs/rank_1.log").exists()
    );
    assert_eq!(std::fs::read_dir(folder.path().join("lightning_logs")).unwrap().count(), 1);
    let path = folder.path().join(path.trim());
    let mut weights = voltaic::checkpoint::Checkpoint::load(&path).unwrap().weights;
    weights.sort_by(|a, b| a.0.cmp(&b.0));
    weights
}

#[test]
fn the_recipe_runs_on_two_devices_and_on_emulated_hpus_alike() {
    assert_same(&fit_recipe("hpu", "hpu_parallel"), &fit_recipe("cpu", "ddp"));
}

/// What `voltaic test` shows on a number of devices.
fn tested(devices: &str) -> Vec<(String, f64)> {
    let folder = TempDir::new().unwrap();
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/mnist.yaml");
    let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
    command.args(["test", "--config", recipe, "--trainer.accelerator=cpu", "--trainer.devices", devices]);
    command.args(["--data.num_workers=0", "--data.batch_size=300"]);
    let output = command.env("OMP_NUM_THREADS", "1").current_dir(folder.path()).output().unwrap();
    let text = text_of(&output);
    let row = |line: &str| {
        let (name, value) = line.trim().split_once(' ')?;
        Some((name.to_owned(), value.trim().parse().ok().filter(|_| name.starts_with("test_"))?))
    };
    text.lines().filter_map(row).collect()
}

#[test]
fn models_that_ship_are_tested_alike_on_any_number_of_devices() {
    let alone = tested("1");
    assert_eq!(alone.len(), 2, "{alone:?}");
    let together = tested("3");
    assert_eq!(together.len(), alone.len(), "{together:?}");
    for ((name, value), (_, expected)) in together.iter().zip(&alone) {
        assert!((value - expected).abs() < 1e-5, "{name}: {value} {expected}");
    }
}

/// Two ranks on one node, and one on each of two.
#[test]
fn the_command_takes_the_flags_of_torchrun() {
    let digits = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/digits");
    let data = format!("--data.data_dir={}", digits.display());
    let fit = ["fit", "--model=Mlp", "--data=MnistData", &data, "--trainer.accelerator=cpu"];
    let limits = ["--trainer.max_steps=1", "--trainer.limit_val_batches=1"];
    for (nodes, ranks) in [(1, 2), (2, 1)] {
        let (folder, port) = (TempDir::new().unwrap(), free_port().to_string());
        let started: Vec<_> = (0..nodes)
            .map(|node| {
                let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
                command.args(["run", &format!("--nproc_per_node={ranks}"), &format!("--nnodes={nodes}")]);
                command.args([
                    "--node-rank",
                    &node.to_string(),
                    "--master_addr=127.0.0.1",
                    "--master_port",
                    &port,
                ]);
                command.args(fit).args(limits).current_dir(folder.path());
                command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
            })
            .collect();
        for node in started {
            text_of(&node.wait_with_output().unwrap());
        }
        let run = folder.path().join("lightning_logs/version_0");
        let config = std::fs::read_to_string(run.join("config.yaml")).unwrap();
        let keys = [format!("devices: {ranks}\n"), format!("num_nodes: {nodes}\n")];
        assert!(keys.iter().all(|key| config.contains(key)), "{config}");
        let path = run.join("checkpoints/epoch=0-step=1.ckpt");
        let checkpoint = voltaic::checkpoint::Checkpoint::load(&path).unwrap();
        assert_eq!(checkpoint.training.unwrap().json["world_size"], 2);
    }
    let output = Command::new(env!("CARGO_BIN_EXE_voltaic")).args(["run", "models"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.code() == Some(2) && text.contains("`models` has no ranks; give one of fit"),
        "{text}"
    );
}

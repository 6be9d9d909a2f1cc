use super::*;

fn variables(pairs: &[(&str, &str)]) -> Variables {
    pairs.iter().copied().collect()
}

/// `NAME=value NAME=value`.
fn parse(text: &str) -> Variables {
    text.split_whitespace().filter_map(|pair| pair.split_once('=')).collect()
}

fn wanted(devices: usize, num_nodes: usize) -> Wanted {
    Wanted { devices, is_auto: false, num_nodes, is_distributed: true, restarts: false }
}

const LSF: &str = "LSB_JOBID=1 LSB_DJOB_RANKFILE=hosts JSM_NAMESPACE_LOCAL_RANK=0 JSM_NAMESPACE_SIZE=2";

#[test]
fn launchers_are_known_by_their_variables_in_lightnings_order() {
    use ClusterEnvironment::{Kubeflow, Lightning, Lsf, Mpi, Slurm, TorchElastic};
    let slurm_lsf = format!("SLURM_NTASKS=2 {LSF}");
    let lsf_mpi = format!("{LSF} OMPI_COMM_WORLD_SIZE=2");
    for (given, expected, why) in [
        ("", Lightning, "nothing is set"),
        ("TORCHELASTIC_RUN_ID=x SLURM_NTASKS=2 OMPI_COMM_WORLD_SIZE=2", TorchElastic, "torchrun comes first"),
        ("SLURM_NTASKS=2 SLURM_JOB_NAME=train", Slurm, "a job"),
        ("SLURM_NTASKS=1", Slurm, "one task is a job, too"),
        ("SLURM_NTASKS=2 SLURM_JOB_NAME=bash", Lightning, "a shell in an allocation"),
        ("SLURM_NTASKS=2 SLURM_JOB_NAME=interactive", Lightning, "as in Lightning"),
        ("SLURM_JOB_ID=7", Lightning, "srun did not start it"),
        (&slurm_lsf, Slurm, "Slurm before LSF"),
        (LSF, Lsf, "jsrun"),
        ("LSB_JOBID=1 LSB_DJOB_RANKFILE=hosts", Lightning, "a job of LSF without jsrun"),
        (&lsf_mpi, Lsf, "LSF before MPI"),
        ("OMPI_COMM_WORLD_SIZE=2 LOCAL_RANK=1", Mpi, "Open MPI before a bare LOCAL_RANK"),
        ("PMI_SIZE=4", Mpi, "MPICH and Intel MPI"),
        ("OMPI_COMM_WORLD_SIZE=1", Lightning, "mpirun of one process"),
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", Kubeflow, "a pod per rank"),
        (
            "RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1 LOCAL_RANK=0",
            Lightning,
            "somebody's own launcher",
        ),
        (
            "WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1 NODE_RANK=0",
            Lightning,
            "a node whose ranks are to be started",
        ),
    ] {
        assert_eq!(ClusterEnvironment::detect(&parse(given)), expected, "{given}: {why}");
    }
}

/// `rank of size, local rank, node, address:port, whether it holds the store, attempt`. The address is loopback if all ranks are
/// on one host, whatever MASTER_ADDR says.
fn place(variables: &Variables, wanted: Wanted) -> String {
    match Placement::find(variables, wanted) {
        Ok(Placement::Rank(found)) => {
            let RankPlacement { rank, world_size, local_rank, node_rank, master_addr, master_port, .. } =
                found;
            let store = if found.hosts_store { "store" } else { "guest" };
            let attempt = found.attempt;
            format!(
                "{rank}/{world_size} l{local_rank} n{node_rank} {master_addr}:{master_port} {store} a{attempt}"
            )
        }
        Ok(other) => format!("{other:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn each_launcher_tells_ranks_in_its_own_words() {
    for (given, devices, nodes, expected) in [
        (
            "TORCHELASTIC_RUN_ID=x RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 MASTER_ADDR=a \
             MASTER_PORT=29500 TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=2",
            2,
            2,
            "3/4 l1 n1 a:29500 guest a2",
        ),
        (
            "TORCHELASTIC_RUN_ID=x RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a TORCHELASTIC_USE_AGENT_STORE=False",
            2,
            1,
            "0/2 l0 n0 127.0.0.1:12910 store a0",
        ),
        (
            "SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2 SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NNODES=2 \
             SLURM_NODELIST=alpha[01-03,07] SLURM_JOB_ID=1234567",
            2,
            2,
            "2/4 l0 n1 alpha01:19567 guest a0",
        ),
        (
            "SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2(x2) SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_JOB_NODELIST=host[5-6] \
             MASTER_PORT=5000",
            2,
            2,
            "0/4 l0 n0 host5:5000 store a0",
        ),
        (
            "SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2 SLURM_PROCID=1 SLURM_LOCALID=1",
            2,
            1,
            "1/2 l1 n0 127.0.0.1:12910 guest a0",
        ),
        (
            "SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2 SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_JOB_ID=ä123",
            2,
            1,
            "1/2 l1 n0 127.0.0.1:12910 guest a0",
        ),
        (
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 \
             MASTER_ADDR=a",
            2,
            2,
            "3/4 l1 n1 a:12910 guest a0",
        ),
        (
            "PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2",
            2,
            1,
            "0/2 l0 n0 127.0.0.1:12910 store a0",
        ),
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=pod-0 MASTER_PORT=23456", 1, 2, "1/2 l0 n1 pod-0:23456 guest a0"),
        ("LOCAL_RANK=1 NODE_RANK=1 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1", 2, 2, "3/4 l1 n1 a:1 guest a0"),
        (
            "LOCAL_RANK=0 WORLD_SIZE=2 MASTER_PORT=1 VOLTAIC_LAUNCHER=1 VOLTAIC_RESTART_COUNT=1",
            2,
            1,
            "0/2 l0 n0 127.0.0.1:1 guest a1",
        ),
    ] {
        assert_eq!(place(&parse(given), wanted(devices, nodes)), expected, "{given}");
    }
}

#[test]
fn lsf_reads_the_hosts_from_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hosts");
    std::fs::write(&path, "launch\nn1\nn1\nn2\nn2\n").unwrap();
    let of = |path: &str, rank: &str| {
        let common = parse("LSB_JOBID=4321 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK=1");
        let own = variables(&[("LSB_DJOB_RANKFILE", path), ("JSM_NAMESPACE_RANK", rank)]);
        place(&Variables(common.0.into_iter().chain(own.0).collect()), wanted(2, 2))
    };
    assert_eq!(of(path.to_str().unwrap(), "3"), "3/4 l1 n1 n1:10321 guest a0");
    std::fs::write(&path, "launch\n").unwrap();
    assert!(of(path.to_str().unwrap(), "3").contains("names no compute node"));
    assert!(of("/nowhere", "3").contains("LSB_DJOB_RANKFILE: /nowhere cannot be read"));
    assert!(of("/dev/zero", "3").contains("/dev/zero cannot be read: it is a device, pipe or socket"));
}

#[test]
fn without_a_launcher_the_ranks_of_this_node_are_started() {
    let launch = |given: &str, devices, nodes| match Placement::find(&parse(given), wanted(devices, nodes)) {
        Ok(Placement::Launcher(Launch { devices, num_nodes, node_rank, master_addr, master_port })) => {
            format!("{devices}x{num_nodes} n{node_rank} {master_addr:?} {master_port:?}")
        }
        other => format!("{other:?}"),
    };
    assert_eq!(launch("", 2, 1), "2x1 n0 None None");
    assert_eq!(
        launch("WORLD_SIZE=16 NODE_RANK=0 MASTER_PORT=29500", 8, 2),
        "8x2 n0 None Some(29500)",
        "node 0 knows its own address"
    );
    assert_eq!(
        launch("NODE_RANK=1 MASTER_PORT=29500 MASTER_ADDR=a", 8, 2),
        r#"8x2 n1 Some("a") Some(29500)"#
    );
}

#[test]
fn contradictions_name_the_variable_and_a_way_out() {
    for (given, devices, nodes, expected) in [
        (
            "RANK=0 WORLD_SIZE=1000000000 MASTER_ADDR=a MASTER_PORT=1",
            1,
            1,
            "WORLD_SIZE: 1000000000 ranks are more than 1048576; set it to the number of processes",
        ),
        (
            "TORCHELASTIC_RUN_ID=x RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 MASTER_ADDR=a",
            2,
            1,
            "WORLD_SIZE: 4 ranks, but trainer.devices=2 x trainer.num_nodes=1 is another number; make them equal",
        ),
        (
            "TORCHELASTIC_RUN_ID=x RANK=0 WORLD_SIZE=2 LOCAL_RANK=0",
            2,
            1,
            "MASTER_ADDR: not set, but torchrun started this process; set it",
        ),
        (
            "TORCHELASTIC_RUN_ID=x WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a",
            2,
            1,
            "RANK: not set, but torchrun started this process",
        ),
        (
            "TORCHELASTIC_RUN_ID=x RANK=2 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a",
            2,
            1,
            "RANK: rank 2 of 2; ranks count from 0",
        ),
        (
            "TORCHELASTIC_RUN_ID=x RANK=1 WORLD_SIZE=2 LOCAL_RANK=2 MASTER_ADDR=a",
            2,
            1,
            "LOCAL_RANK: 2 of 2 ranks on this node",
        ),
        (
            "TORCHELASTIC_RUN_ID=x RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=70000",
            2,
            1,
            "MASTER_PORT: 70000 is not a port; use a port from 1 to 65535",
        ),
        ("SLURM_NTASKS=2", 2, 1, "SLURM_NTASKS: 2 tasks without SLURM_NTASKS_PER_NODE; write #SBATCH"),
        (
            "SLURM_NTASKS=1",
            2,
            1,
            "SLURM_NTASKS: 1 task for trainer.devices=2 x trainer.num_nodes=1; start it",
        ),
        (
            "SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=4 SLURM_NNODES=1",
            2,
            2,
            "SLURM_NNODES: 1 nodes, but trainer.num_nodes=2",
        ),
        (
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            2,
            2,
            "MASTER_ADDR: not set, but MPI started this process",
        ),
        (
            "PMI_RANK=0 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=4",
            2,
            2,
            "PMI_SIZE: 4 ranks on this node, but trainer.devices=2",
        ),
        ("LOCAL_RANK=0 WORLD_SIZE=2", 2, 1, "MASTER_PORT: not set, but LOCAL_RANK is; set it"),
        ("LOCAL_RANK=0 NODE_RANK=1 MASTER_PORT=1", 2, 2, "MASTER_ADDR: not set, but a launcher that sets"),
    ] {
        let error = place(&parse(given), wanted(devices, nodes));
        assert!(error.contains(expected), "{given}: {error}");
    }
}

#[test]
fn ranks_beyond_the_last_are_recognised_by_the_launchers_own_variables() {
    for (given, devices, nodes, expected) in [
        (
            "LOCAL_RANK=5 WORLD_SIZE=2 MASTER_PORT=1",
            2,
            1,
            "LOCAL_RANK: 5 of 2 ranks on this node; local ranks count from 0",
        ),
        (
            "LOCAL_RANK=0 NODE_RANK=2 WORLD_SIZE=4 MASTER_PORT=1 MASTER_ADDR=a",
            2,
            2,
            "NODE_RANK: rank 4 of 4; ranks count from 0 to WORLD_SIZE - 1",
        ),
        (
            "SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2 SLURM_PROCID=2 SLURM_LOCALID=1",
            2,
            1,
            "SLURM_PROCID: rank 2 of 2; ranks count from 0 to SLURM_NTASKS - 1",
        ),
    ] {
        let error = place(&parse(given), wanted(devices, nodes));
        assert!(error.contains(expected), "{given}: {error}");
    }
}

#[test]
fn with_devices_auto_the_launcher_says_how_many_ranks_there_are() {
    let auto = Wanted { is_auto: true, ..wanted(8, 1) };
    let given = "TORCHELASTIC_RUN_ID=x RANK=1 WORLD_SIZE=3 LOCAL_RANK=1 LOCAL_WORLD_SIZE=3 MASTER_ADDR=a";
    assert_eq!(place(&parse(given), auto), "1/3 l1 n0 127.0.0.1:12910 guest a0");
    assert_eq!(parse(given).launched_ranks(), Some(3));
    let two_nodes = Wanted { num_nodes: 2, ..auto };
    assert!(place(&parse(given), two_nodes).contains("trainer.num_nodes=2 is another number"));
    assert_eq!(parse("LOCAL_RANK=1 WORLD_SIZE=4").launched_ranks(), Some(4));
    assert_eq!(parse("WORLD_SIZE=4").launched_ranks(), None, "nobody has started them");
}

#[test]
fn a_process_is_alone_if_nobody_has_started_others() {
    for (given, expected) in [
        ("", None),
        ("WORLD_SIZE=1", None),
        ("WORLD_SIZE=2", Some("WORLD_SIZE: 2 ranks, but trainer.devices and trainer.num_nodes ask for one")),
        ("WORLD_SIZE=2 LOCAL_RANK=0 VOLTAIC_LAUNCHER=a", None),
        ("TORCHELASTIC_RUN_ID=x WORLD_SIZE=2", Some("WORLD_SIZE: 2 ranks")),
        ("PMI_SIZE=3", Some("PMI_SIZE: 3 ranks")),
        ("SLURM_NTASKS=4", None),
        ("SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4", Some("SLURM_STEP_NUM_TASKS: 4 ranks")),
        (LSF, Some("JSM_NAMESPACE_SIZE: 2 ranks")),
    ] {
        let found = parse(given).check_alone().map_err(|error| error.to_string());
        match expected {
            None => assert_eq!(found, Ok(()), "{given}"),
            Some(text) => {
                assert!(found.as_ref().is_err_and(|error| error.contains(text)), "{given}: {found:?}")
            }
        }
    }
}

#[test]
fn a_process_that_is_to_be_started_again_gets_a_launcher() {
    let one = Wanted { is_distributed: false, restarts: true, ..wanted(1, 1) };
    let launch = Launch { devices: 1, num_nodes: 1, node_rank: 0, master_addr: None, master_port: None };
    assert_eq!(Placement::find(&parse(""), one).unwrap(), Placement::Launcher(launch));
    let child = "LOCAL_RANK=0 WORLD_SIZE=1 MASTER_PORT=1 VOLTAIC_LAUNCHER=a";
    assert_eq!(place(&parse(child), one), "0/1 l0 n0 127.0.0.1:1 guest a0");
    let torchrun = "TORCHELASTIC_RUN_ID=x RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=a";
    let refused = place(&parse(torchrun), one);
    assert!(
        refused.contains("trainer.max_restarts: set, but torchrun starts the ranks; leave it out"),
        "{refused}"
    );
}

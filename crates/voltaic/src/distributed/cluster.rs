//! Which launcher started this process, and what it says about ranks: read from the environment, in Lightning's order.

use std::collections::BTreeSet;
use std::path::Path;

use super::environment::ClusterEnvironment;
use super::host::{LOOPBACK, first_host};
use super::launch::Launch;
use super::placement::{Placement, RankPlacement, Wanted};
use super::variables::{ATTEMPT, LAUNCHER, Variables};
use crate::config::read_text_file;
use crate::error::ConfigError;
use crate::ffi::JobSecret;

/// Port of the store under launchers that name none, as in Lightning.
const DEFAULT_PORT: u16 = 12910;

/// More are a slip of the pen.
const MAX_RANKS: usize = 1 << 20;

/// A file of LSF has a line for each rank.
const MAX_RANK_FILE: u64 = 16 << 20;

impl Placement {
    pub(crate) fn find(variables: &Variables, wanted: Wanted) -> Result<Self, ConfigError> {
        let environment = ClusterEnvironment::detect(variables);
        let found = match environment {
            ClusterEnvironment::TorchElastic => torchrun(variables)?,
            ClusterEnvironment::Slurm => slurm(variables, wanted)?,
            ClusterEnvironment::Lsf => lsf(variables)?,
            ClusterEnvironment::Mpi => mpi(variables)?,
            ClusterEnvironment::Kubeflow => kubeflow(variables)?,
            ClusterEnvironment::Lightning if variables.text("LOCAL_RANK").is_some() => {
                own(variables, wanted)?
            }
            ClusterEnvironment::Lightning => return not_started(variables, wanted),
        };
        if wanted.restarts && found.launcher.is_none() {
            let what = format!("set, but {environment} starts the ranks");
            let remedy = match environment {
                ClusterEnvironment::TorchElastic => "leave it out, and use torchrun --max-restarts",
                _ => "leave it out: who started the ranks has to start them again, with ckpt_path=last",
            };
            return Err(ConfigError::new("trainer.max_restarts", what, remedy));
        }
        found.check(wanted, environment, variables.secret())
    }
}

impl Variables {
    /// An error if several processes were started, but the configuration has one device on one node: each would train alone.
    pub(crate) fn check_alone(&self) -> Result<(), ConfigError> {
        let names: &[&str] = match ClusterEnvironment::detect(self) {
            _ if self.text(LAUNCHER).is_some() => return Ok(()), // a rank may well train something by itself
            // an allocation may have more tasks than the step that runs
            ClusterEnvironment::Slurm => &["SLURM_STEP_NUM_TASKS"],
            ClusterEnvironment::Lsf => &["JSM_NAMESPACE_SIZE"],
            ClusterEnvironment::Mpi => &["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"],
            _ => &["WORLD_SIZE"],
        };
        let found = names.iter().find_map(|&name| Some((name, self.number(name).ok()??)));
        match found.filter(|&(_, size)| size > 1) {
            None => Ok(()),
            Some((name, size)) => Err(ConfigError::new(
                name,
                format!("{size} ranks, but trainer.devices and trainer.num_nodes ask for one"),
                "set them to what was started, or trainer.strategy=single_device for processes that have nothing to do \
                 with each other",
            )),
        }
    }
}

/// What a launcher says.
#[derive(Default)]
struct Found {
    rank: usize,
    world_size: usize,
    local_rank: usize,
    /// Variables that gave rank, world size and local rank.
    names: [&'static str; 3],
    /// Ranks per node, if the launcher sets it.
    local_world_size: Option<usize>,
    node_rank: usize,
    master_addr: String,
    master_port: u16,
    launcher_hosts_store: bool,
    launcher: Option<String>,
    elastic_run: Option<String>,
    attempt: u64,
}

impl Found {
    fn check(
        self,
        wanted: Wanted,
        environment: ClusterEnvironment,
        secret: Option<JobSecret>,
    ) -> Result<Placement, ConfigError> {
        let Wanted { devices, is_auto, num_nodes, .. } = wanted;
        let size = self.world_size;
        let [rank_name, name, local_name] = self.names;
        if size > MAX_RANKS {
            let what = format!("{size} ranks are more than {MAX_RANKS}");
            return Err(ConfigError::new(name, what, "set it to the number of processes that were started"));
        }
        let fits = if is_auto { size.is_multiple_of(num_nodes) } else { devices * num_nodes == size };
        if !fits {
            let asked = if is_auto { String::new() } else { format!("trainer.devices={devices} x ") };
            let what = format!("{size} ranks, but {asked}trainer.num_nodes={num_nodes} is another number");
            let remedy = format!(
                "make them equal: change the keys, or start {} processes with {environment}",
                devices * num_nodes
            );
            return Err(ConfigError::new(name, what, remedy));
        }
        let per_node = self.local_world_size.unwrap_or(size / num_nodes);
        if !is_auto && environment != ClusterEnvironment::Kubeflow && per_node != devices {
            let what = format!("{per_node} ranks on this node, but trainer.devices={devices}");
            return Err(ConfigError::new(
                name,
                what,
                "start as many processes per node as there are devices",
            ));
        }
        if self.local_rank >= per_node.max(1) {
            let what = format!("{} of {per_node} ranks on this node", self.local_rank);
            return Err(ConfigError::new(
                local_name,
                what,
                "local ranks count from 0 to trainer.devices - 1",
            ));
        }
        if self.rank >= size {
            let what = format!("rank {} of {size}", self.rank);
            return Err(ConfigError::new(rank_name, what, format!("ranks count from 0 to {name} - 1")));
        }
        if size == 1 && !wanted.is_distributed && self.launcher.is_none() {
            return Ok(Placement::Single);
        }
        // whatever MASTER_ADDR says: ranks on one host must not be reachable from others
        let master_addr =
            if num_nodes == 1 && per_node == size { LOOPBACK.to_owned() } else { self.master_addr };
        Ok(Placement::Rank(RankPlacement {
            environment,
            rank: self.rank,
            world_size: size,
            local_rank: self.local_rank,
            node_rank: self.node_rank,
            master_addr,
            master_port: self.master_port,
            hosts_store: self.rank == 0 && !self.launcher_hosts_store,
            launcher: self.launcher,
            elastic_run: self.elastic_run,
            secret,
            attempt: self.attempt,
        }))
    }
}

fn required_address(variables: &Variables, environment: ClusterEnvironment) -> Result<String, ConfigError> {
    variables.text("MASTER_ADDR").map(str::to_owned).ok_or_else(|| {
        let what = format!("not set, but {environment} started this process");
        ConfigError::new("MASTER_ADDR", what, "set it to the name or address of the node of rank 0")
    })
}

fn torchrun(variables: &Variables) -> Result<Found, ConfigError> {
    let environment = ClusterEnvironment::TorchElastic;
    Ok(Found {
        rank: variables.required("RANK", environment)?,
        world_size: variables.required("WORLD_SIZE", environment)?,
        local_rank: variables.required("LOCAL_RANK", environment)?,
        names: ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
        local_world_size: variables.number("LOCAL_WORLD_SIZE")?,
        node_rank: variables.number("GROUP_RANK")?.unwrap_or(0),
        master_addr: required_address(variables, environment)?,
        master_port: variables.port("MASTER_PORT")?.unwrap_or(DEFAULT_PORT),
        launcher_hosts_store: variables.text("TORCHELASTIC_USE_AGENT_STORE") == Some("True"),
        launcher: None,
        elastic_run: variables.text("TORCHELASTIC_RUN_ID").map(str::to_owned),
        attempt: variables.number("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0) as u64,
    })
}

fn slurm(variables: &Variables, wanted: Wanted) -> Result<Found, ConfigError> {
    let environment = ClusterEnvironment::Slurm;
    let world_size = variables.required("SLURM_NTASKS", environment)?;
    let per_node = variables.text("SLURM_NTASKS_PER_NODE");
    // "4(x2)" in some versions: 4 on each of 2 nodes
    let per_node = per_node.and_then(|text| text.split('(').next()?.trim().parse::<usize>().ok());
    if world_size > 1 && per_node.is_none() {
        let what = format!("{world_size} tasks without SLURM_NTASKS_PER_NODE");
        let remedy = format!(
            "write #SBATCH --ntasks-per-node={}, not --ntasks, so that each node has one task per device",
            wanted.devices
        );
        return Err(ConfigError::new("SLURM_NTASKS", what, remedy));
    }
    if world_size == 1 && wanted.devices * wanted.num_nodes > 1 {
        let what =
            format!("1 task for trainer.devices={} x trainer.num_nodes={}", wanted.devices, wanted.num_nodes);
        let remedy = "start it with srun --ntasks-per-node=<devices>, or set SLURM_JOB_NAME=interactive to have voltaic start the processes of this node";
        return Err(ConfigError::new("SLURM_NTASKS", what, remedy));
    }
    if let Some(nodes) = variables.number("SLURM_NNODES")?
        && nodes != wanted.num_nodes
        && !wanted.is_auto
    {
        let what = format!("{nodes} nodes, but trainer.num_nodes={}", wanted.num_nodes);
        return Err(ConfigError::new("SLURM_NNODES", what, "make them equal"));
    }
    let nodes = variables.text("SLURM_NODELIST").or_else(|| variables.text("SLURM_JOB_NODELIST"));
    let master_addr = match (variables.text("MASTER_ADDR"), nodes) {
        (Some(address), _) => address.to_owned(),
        (None, Some(list)) => first_host(list).ok_or_else(|| {
            ConfigError::new(
                "SLURM_NODELIST",
                format!("`{list}` is not understood"),
                "set MASTER_ADDR to the first node",
            )
        })?,
        (None, None) => "127.0.0.1".to_owned(),
    };
    let job_port = variables.text("SLURM_JOB_ID").and_then(|id| {
        let last = id.get(id.len().saturating_sub(4)..)?;
        Some(15000 + last.parse::<u16>().ok()?)
    });
    Ok(Found {
        rank: variables.required("SLURM_PROCID", environment)?,
        world_size,
        local_rank: variables.required("SLURM_LOCALID", environment)?,
        names: ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
        local_world_size: per_node,
        node_rank: variables.number("SLURM_NODEID")?.unwrap_or(0),
        master_addr,
        master_port: variables.port("MASTER_PORT")?.or(job_port).unwrap_or(DEFAULT_PORT),
        ..Found::default()
    })
}

fn lsf(variables: &Variables) -> Result<Found, ConfigError> {
    let environment = ClusterEnvironment::Lsf;
    let path = variables.text("LSB_DJOB_RANKFILE").unwrap_or_default();
    let unreadable =
        |what: String| ConfigError::new("LSB_DJOB_RANKFILE", what, "start with jsrun inside an LSF job");
    let text = read_text_file(Path::new(path), MAX_RANK_FILE)
        .map_err(|error| unreadable(format!("{path} cannot be read: {error}")))?;
    // the first line is the node that launches, which computes nothing
    let hosts: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).skip(1).collect();
    let first = *hosts.first().ok_or_else(|| unreadable(format!("{path} names no compute node")))?;
    let num_hosts = hosts.iter().collect::<BTreeSet<_>>().len();
    let job = variables.required("LSB_JOBID", environment)?;
    let world_size = variables.required("JSM_NAMESPACE_SIZE", environment)?;
    let rank = variables.required("JSM_NAMESPACE_RANK", environment)?;
    let per_node = world_size / num_hosts;
    Ok(Found {
        rank,
        world_size,
        local_rank: variables.required("JSM_NAMESPACE_LOCAL_RANK", environment)?,
        names: ["JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"],
        local_world_size: Some(per_node),
        node_rank: rank / per_node.max(1),
        master_addr: variables.text("MASTER_ADDR").unwrap_or(first).to_owned(),
        master_port: variables.port("MASTER_PORT")?.unwrap_or(10_000 + (job % 1000) as u16),
        ..Found::default()
    })
}

/// Names of rank, size, local rank and local size under Open MPI, and under MPICH and Intel MPI.
const MPI_NAMES: [[&str; 4]; 2] = [
    [
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ],
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
];

fn mpi(variables: &Variables) -> Result<Found, ConfigError> {
    let environment = ClusterEnvironment::Mpi;
    let is_open_mpi = variables.text("OMPI_COMM_WORLD_SIZE").is_some();
    let [rank_name, size_name, local_name, local_size] = MPI_NAMES[usize::from(!is_open_mpi)];
    let world_size = variables.required(size_name, environment)?;
    let rank = variables.required(rank_name, environment)?;
    let per_node = variables.required(local_size, environment)?;
    let address = if per_node == world_size {
        variables.text("MASTER_ADDR").unwrap_or("127.0.0.1").to_owned()
    } else {
        required_address(variables, environment)?
    };
    Ok(Found {
        rank,
        world_size,
        local_rank: variables.required(local_name, environment)?,
        names: [rank_name, size_name, local_name],
        local_world_size: Some(per_node),
        node_rank: rank / per_node.max(1),
        master_addr: address,
        master_port: variables.port("MASTER_PORT")?.unwrap_or(DEFAULT_PORT),
        ..Found::default()
    })
}

fn kubeflow(variables: &Variables) -> Result<Found, ConfigError> {
    let environment = ClusterEnvironment::Kubeflow;
    let rank = variables.required("RANK", environment)?;
    Ok(Found {
        rank,
        world_size: variables.required("WORLD_SIZE", environment)?,
        local_rank: 0,
        names: ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
        local_world_size: Some(1),
        node_rank: rank,
        master_addr: required_address(variables, environment)?,
        master_port: variables.port("MASTER_PORT")?.unwrap_or(DEFAULT_PORT),
        ..Found::default()
    })
}

/// Started by voltaic's launcher, or with the same variables.
fn own(variables: &Variables, wanted: Wanted) -> Result<Found, ConfigError> {
    let environment = ClusterEnvironment::Lightning;
    let Wanted { is_auto, num_nodes, .. } = wanted;
    let local_rank = variables.required("LOCAL_RANK", environment)?;
    let node_rank = node_rank(variables)?.unwrap_or(0);
    let given = variables.number("WORLD_SIZE")?;
    let devices = match (is_auto, given, variables.number("LOCAL_WORLD_SIZE")?) {
        (true, _, Some(local)) => local,
        (true, Some(size), None) => size / num_nodes,
        _ => wanted.devices,
    };
    let world_size = given.unwrap_or(devices * num_nodes);
    let rank = node_rank * devices + local_rank;
    if let Some(given) = variables.number("RANK")?
        && given != rank
    {
        let what = format!(
            "{given}, but NODE_RANK={node_rank} x trainer.devices={devices} + LOCAL_RANK={local_rank} is {rank}"
        );
        return Err(ConfigError::new("RANK", what, "correct one of them, or unset RANK"));
    }
    let address = match variables.text("MASTER_ADDR") {
        None if num_nodes > 1 => required_address(variables, environment)?,
        address => address.unwrap_or("127.0.0.1").to_owned(),
    };
    let launcher = variables.text(LAUNCHER).map(str::to_owned);
    let port = variables.port("MASTER_PORT")?;
    if port.is_none() && world_size > 1 {
        let what = "not set, but LOCAL_RANK is";
        return Err(ConfigError::new(
            "MASTER_PORT",
            what,
            "set it to a free port of node 0, or unset LOCAL_RANK",
        ));
    }
    Ok(Found {
        rank,
        world_size,
        local_rank,
        names: ["NODE_RANK", "WORLD_SIZE", "LOCAL_RANK"],
        local_world_size: Some(devices),
        node_rank,
        master_addr: address,
        master_port: port.unwrap_or(0),
        launcher_hosts_store: launcher.is_some(),
        launcher,
        elastic_run: None,
        attempt: variables.number(ATTEMPT)?.unwrap_or(0) as u64,
    })
}

fn node_rank(variables: &Variables) -> Result<Option<usize>, ConfigError> {
    Ok(variables.number("NODE_RANK")?.or(variables.number("GROUP_RANK")?))
}

/// No launcher has started ranks: this process is alone, or it is to start those of its node.
fn not_started(variables: &Variables, wanted: Wanted) -> Result<Placement, ConfigError> {
    let Wanted { devices, num_nodes, is_distributed, restarts, .. } = wanted;
    let world_size = devices * num_nodes;
    if world_size == 1 && !is_distributed && !restarts {
        return Ok(Placement::Single);
    }
    if let Some(given) = variables.number("WORLD_SIZE")?
        && given != world_size
    {
        let what =
            format!("{given}, but trainer.devices={devices} x trainer.num_nodes={num_nodes} is {world_size}");
        return Err(ConfigError::new("WORLD_SIZE", what, "make them equal, or unset WORLD_SIZE"));
    }
    if world_size == 1 && !restarts {
        return Ok(Placement::Rank(RankPlacement {
            environment: ClusterEnvironment::Lightning,
            rank: 0,
            world_size,
            local_rank: 0,
            node_rank: 0,
            master_addr: LOOPBACK.to_owned(),
            master_port: 0,
            hosts_store: true,
            launcher: None,
            elastic_run: None,
            secret: None,
            attempt: 0,
        }));
    }
    let needs = |name: &str, what: &str, remedy: &'static str| Err(ConfigError::new(name, what, remedy));
    let not_set = format!("not set with trainer.num_nodes={num_nodes}");
    let node_rank = match node_rank(variables)? {
        None if num_nodes > 1 => return needs("NODE_RANK", &not_set, "set it to 0, 1, ... on the nodes"),
        node_rank => node_rank.unwrap_or(0),
    };
    if node_rank >= num_nodes {
        let what = format!("{node_rank} of trainer.num_nodes={num_nodes}");
        return needs("NODE_RANK", &what, "nodes count from 0 to num_nodes - 1");
    }
    let master_port = variables.port("MASTER_PORT")?;
    if num_nodes > 1 && master_port.is_none() {
        return needs("MASTER_PORT", &not_set, "set it to a free port of node 0, the same on all nodes");
    }
    let master_addr = variables.text("MASTER_ADDR").map(str::to_owned);
    if node_rank > 0 && master_addr.is_none() {
        return needs("MASTER_ADDR", &not_set, "set it to the name or address of node 0");
    }
    Ok(Placement::Launcher(Launch { devices, num_nodes, node_rank, master_addr, master_port }))
}

#[cfg(test)]
mod tests;

//! Starts the ranks of a node by running the same command again, and supervises them.
//!
//! The process that the user started becomes the launcher and trains nothing: so it can show why a rank ended, take the
//! others down, and start all of them again, whichever rank it was. Each rank gets Lightning's variables (`MASTER_ADDR`,
//! `MASTER_PORT`, `WORLD_SIZE`, `NODE_RANK`, `LOCAL_RANK`). Rank 0 has the launcher's output; others write to files.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGCONT, SIGKILL, SIGTERM};

use super::cores;
use super::host::{LOOPBACK, check_open_files, host_name, is_loopback, listen};
use super::launch::Launch;
use super::signals::Signals;
use super::variables::{ATTEMPT, LAUNCHER, NOTE, SECRET};
use crate::error::{DistributedError, Error, Problem, Result, TorchError, TorchErrorKind, write_stderr};
use crate::ffi::{self, JobSecret, Store};

/// How often the launcher checks its ranks.
const POLL: Duration = Duration::from_millis(25);
/// How long ranks have to end after SIGTERM before they are killed.
const GRACE: Duration = Duration::from_secs(3);
/// How long they have after Ctrl-C: a batch, a checkpoint.
const INTERRUPT_GRACE: Duration = Duration::from_secs(60);
/// How long a rank waits for the launcher to show why another has ended.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest end of a rank's output that is shown when it fails.
const SHOWN_BYTES: u64 = 4096;

/// The exit code of a rank whose command line or configuration is wrong.
const MISTAKE: i32 = 2;

struct Rank {
    local_rank: usize,
    rank: usize,
    child: Child,
    /// Where its output goes; `None` if it has the launcher's.
    log: Option<PathBuf>,
}

/// Starts the ranks, waits for them, and returns the exit code for this process: 0 if all ended well, else that of the
/// rank that ended first. After a failure they are started again up to `max_restarts` times.
///
/// `log_folder` gets the output of all ranks but global rank 0.
///
/// # Errors
/// [`ConfigError`](crate::error::ConfigError) if this process may have too few open files; [`DistributedError::Rendezvous`] if the store
/// cannot be opened, [`Error::Io`] if a rank cannot be started or its file
/// cannot be made.
pub fn launch(launch: &Launch, max_restarts: u64, log_folder: &Path) -> Result<u8> {
    check_open_files(launch.devices * launch.num_nodes)?;
    let (address, port, _store) = open_store(launch)?;
    if launch.node_rank > 0 {
        let first = launch.node_rank * launch.devices;
        let ranks = match launch.devices {
            1 => format!("rank {first} writes"),
            devices => format!("ranks {first} to {} write", first + devices - 1),
        };
        say(&format!("{ranks} to {}", log_folder.join("rank_<n>.log").display()));
    }
    let signals = Signals::watch()?;
    let note = Note::new();
    let rank_env =
        RankEnv { identity: identity(), secret: secret(launch), note: note.as_ref().map(Note::path) };
    let mut attempt = 0;
    loop {
        let mut ranks = start(launch, &rank_env, (&address, port), attempt, log_folder)?;
        let outcome = watch(&mut ranks, &signals);
        match outcome {
            Outcome::Done => return Ok(0),
            Outcome::Interrupted(code) => return Ok(code),
            Outcome::Failed { index, status } => {
                report(&ranks[index], status);
                stop(&mut ranks, SIGTERM, GRACE);
                if attempt == max_restarts || signals.received().is_some() {
                    return Ok(exit_code(status));
                }
                let is_noted = status.code().is_some() && note.as_ref().is_some_and(Note::is_written);
                if status.code() == Some(MISTAKE) || is_noted {
                    say(
                        "the configuration is wrong, which would end it again: the ranks are not started again",
                    );
                    return Ok(exit_code(status));
                }
                attempt += 1;
                say(&format!("starting all ranks again ({attempt} of at most {max_restarts} times)"));
            }
        }
    }
}

/// The store of the run: node 0's launcher holds it, so that it outlives the ranks.
fn open_store(launch: &Launch) -> Result<(String, u16, Option<Store>)> {
    let port = launch.master_port.unwrap_or(0);
    if launch.node_rank > 0 {
        return Ok((launch.master_addr.clone().unwrap_or_default(), port, None));
    }
    let address = match &launch.master_addr {
        _ if launch.num_nodes == 1 => LOOPBACK.to_owned(),
        Some(given) => given.clone(),
        None => own_address(),
    };
    let own = if is_loopback(&address) { address.as_str() } else { LOOPBACK };
    // ranks of one host are reached on that host alone; its own client need not take the way that others take
    let made = listen(&address, port)
        .map_err(|error| TorchError::new("TCPStore", TorchErrorKind::Other, &error.to_string()));
    let made = made.and_then(|server| Store::tcp(own, port, Some(server), Duration::from_secs(30)));
    let (store, port) = made.map_err(|error| {
        let world_size = launch.devices * launch.num_nodes;
        let (reason, remedy) = if ["EADDRINUSE", "already in use", "in use (os error"]
            .iter()
            .any(|text| error.message.contains(text))
        {
            let remedy = "set MASTER_PORT to a free port, the same on all nodes";
            (format!("MASTER_PORT={port} is in use on this host"), remedy)
        } else {
            (error.message, "check MASTER_PORT")
        };
        let remedy = remedy.to_owned();
        DistributedError::Rendezvous {
            rank: 0,
            world_size,
            address: format!("{address}:{port}"),
            problem: Problem::new(reason, remedy),
        }
    })?;
    Ok((address, port, Some(store)))
}

/// The address of this host that others reach: of the interface that the default route takes.
fn own_address() -> String {
    let route = || -> std::io::Result<String> {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
        socket.connect("192.0.2.1:9")?; // an address for documentation: nothing is sent
        Ok(socket.local_addr()?.ip().to_string())
    };
    route().unwrap_or_else(|_| "127.0.0.1".to_owned())
}

/// A text that no other launcher has.
fn identity() -> String {
    let since = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
    format!("{}/{}/{}", host_name(), std::process::id(), since.as_nanos())
}

/// The secret of the ranks that are started here. For several nodes, the user must set it.
fn secret(launch: &Launch) -> Option<String> {
    let is_given = std::env::var_os(SECRET).is_some_and(|given| !given.is_empty());
    (launch.num_nodes == 1 && !is_given).then(JobSecret::random_text)
}

/// Values that ranks get from their launcher in environment variables.
struct RankEnv {
    identity: String,
    secret: Option<String>,
    note: Option<String>,
}

/// A file without a name, in which ranks report to their launcher that the configuration is wrong. An exit code cannot say so, since
/// programs choose their own.
struct Note(File);

impl Note {
    fn new() -> Option<Self> {
        tempfile::tempfile().ok().map(Self) // without it the ranks are started again
    }

    /// By which processes of the same user open it.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    fn is_written(&self) -> bool {
        self.0.metadata().is_ok_and(|metadata| metadata.len() > 0)
    }
}

fn start(
    launch: &Launch,
    rank_env: &RankEnv,
    (address, port): (&str, u16),
    attempt: u64,
    log_folder: &Path,
) -> Result<Vec<Rank>> {
    let program = std::env::current_exe().map_err(|e| Error::io("find", "this program", e))?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from) / launch.devices;
    let shares = cores::shares(launch.devices)?;
    let mut ranks: Vec<Rank> = Vec::new();
    for local_rank in 0..launch.devices {
        let rank = launch.node_rank * launch.devices + local_rank;
        let mut command = Command::new(&program);
        command
            .args(std::env::args_os().skip(1))
            .env("MASTER_ADDR", address)
            .env("MASTER_PORT", port.to_string())
            .env("WORLD_SIZE", (launch.devices * launch.num_nodes).to_string())
            .env("NODE_RANK", launch.node_rank.to_string())
            .env("LOCAL_RANK", local_rank.to_string())
            .env(LAUNCHER, &rank_env.identity)
            .env(ATTEMPT, attempt.to_string())
            .envs(rank_env.secret.iter().map(|secret| (SECRET, secret)))
            .envs(rank_env.note.iter().map(|note| (NOTE, note)))
            .stdin(Stdio::null())
            // Ctrl-C reaches the launcher alone, which passes it on: once to each rank
            .process_group(0);
        if std::env::var_os("OMP_NUM_THREADS").is_none() {
            command.env("OMP_NUM_THREADS", threads.max(1).to_string());
        }
        ffi::die_with_parent(&mut command);
        let log = match rank {
            0 => None,
            _ => Some(redirect(&mut command, &log_folder.join(format!("rank_{rank}.log")), attempt > 0)?),
        };
        let spawned = match shares.as_ref().and_then(|shares| shares.get(local_rank)) {
            Some(share) => cores::on(share, || command.spawn()),
            None => command.spawn(),
        };
        match spawned {
            Ok(child) => ranks.push(Rank { local_rank, rank, child, log }),
            Err(error) => {
                stop(&mut ranks, SIGKILL, Duration::ZERO);
                return Err(Error::io("start a rank with", &program, error));
            }
        }
    }
    Ok(ranks)
}

/// Sends a rank's output to a file: a new one, or behind what it wrote before it was started again.
fn redirect(command: &mut Command, path: &Path, append: bool) -> Result<PathBuf> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
    }
    if !append {
        // another run may be writing to a file of this name: that one keeps its file
        remove(path)?;
    }
    let file =
        File::options().create(true).append(true).open(path).map_err(|e| Error::io("create", path, e))?;
    let second = file.try_clone().map_err(|e| Error::io("open", path, e))?;
    command.stdout(file).stderr(second);
    Ok(path.to_path_buf())
}

fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path, error)),
        _ => Ok(()),
    }
}

enum Outcome {
    Done,
    /// By Ctrl-C or SIGTERM, with its exit code.
    Interrupted(u8),
    /// This rank ended first, and not well.
    Failed {
        index: usize,
        status: ExitStatus,
    },
}

/// Waits until all ranks have ended, one has failed, or a signal asks to end.
fn watch(ranks: &mut [Rank], signals: &Signals) -> Outcome {
    let mut ended = vec![false; ranks.len()];
    loop {
        if let Some((signal, _)) = signals.received() {
            stop(ranks, signal, INTERRUPT_GRACE);
            return Outcome::Interrupted(128 + signal as u8);
        }
        let mut failed: Vec<(usize, ExitStatus)> = Vec::new();
        for (index, rank) in
            ranks.iter_mut().enumerate().filter(|(index, _)| !ended[*index]).collect::<Vec<_>>()
        {
            if let Ok(Some(status)) = rank.child.try_wait() {
                ended[index] = true;
                if !status.success() {
                    failed.push((index, status));
                }
            }
        }
        // a rank that only notices that another is gone waits before it ends; of those that end at one time, one
        // that was killed says least for itself
        failed.sort_by_key(|(_, status)| status.signal().is_none());
        if let Some((index, status)) = failed.first() {
            return Outcome::Failed { index: *index, status: *status };
        }
        if ended.iter().all(|ended| *ended) {
            return Outcome::Done;
        }
        std::thread::sleep(POLL);
    }
}

/// Sends a signal to all ranks, and kills those that have not ended after `grace`.
fn stop(ranks: &mut [Rank], signal: i32, grace: Duration) {
    for rank in ranks.iter_mut() {
        if matches!(rank.child.try_wait(), Ok(None)) {
            ffi::signal_group(rank.child.id(), signal);
            ffi::signal_group(rank.child.id(), SIGCONT); // one that is stopped would not see it
        }
    }
    let deadline = Instant::now() + grace;
    let mut all_ended = false;
    while !all_ended && Instant::now() < deadline {
        all_ended = ranks.iter_mut().all(|rank| !matches!(rank.child.try_wait(), Ok(None)));
        if !all_ended {
            std::thread::sleep(POLL);
        }
    }
    for rank in ranks.iter_mut() {
        // the whole group: what a rank has started goes with it
        if matches!(rank.child.try_wait(), Ok(None)) {
            ffi::signal_group(rank.child.id(), SIGKILL);
        }
        let _ = rank.child.wait();
    }
}

fn exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(1).max(1),
        (None, Some(signal)) => 128_u8.saturating_add(signal as u8),
        (None, None) => 1,
    }
}

/// Shows which rank ended first, and the end of what it wrote.
fn report(rank: &Rank, status: ExitStatus) {
    let how = match (status.code(), status.signal()) {
        (_, Some(signal)) => format!("was killed by signal {signal}"),
        (Some(code), None) => format!("ended with exit code {code}"),
        (None, None) => "ended".to_owned(),
    };
    let (number, pid) = (rank.rank, rank.child.id());
    let Some(path) = &rank.log else {
        return say(&format!("rank {number} (process {pid}) {how}; the other ranks are stopped"));
    };
    let text = last_lines(path).unwrap_or_default();
    let lines: String = text.lines().map(|line| format!("  {line}\n")).collect();
    say(&format!(
        "rank {number} (local rank {}, process {pid}) {how}; the other ranks are stopped. The end of {}:\n{lines}",
        rank.local_rank,
        path.display()
    ));
}

fn last_lines(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    file.seek(SeekFrom::Start(len.saturating_sub(SHOWN_BYTES)))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let whole = len <= SHOWN_BYTES;
    Ok(if whole { text } else { text.split_once('\n').map_or(text.clone(), |(_, rest)| rest.to_owned()) })
}

/// Writes to standard error, since a log may not be printed.
fn say(text: &str) {
    write_stderr(&format!("launcher: {}\n", text.trim_end()));
}

/// To be called by a rank that could not be built, or whose run has failed: a mistake of the configuration would end it again.
pub(crate) fn report_config_error(error: &Error) {
    let is_mistake =
        matches!(error, Error::Config(_) | Error::Distributed(DistributedError::Different { .. }));
    if let Some(note) = std::env::var_os(NOTE).filter(|_| is_mistake) {
        // without the report the launcher starts the ranks again
        let _ = File::options().append(true).open(note).and_then(|mut file| file.write_all(b"configuration"));
    }
}

/// Whether an error says that another rank is gone, in a hook of the user's, too.
fn is_consequence(error: &Error) -> bool {
    match error {
        Error::Distributed(DistributedError::Collective(failure)) => !failure.timed_out,
        Error::Hook { source, .. } => {
            source.chain().filter_map(|cause| cause.downcast_ref::<Error>()).any(is_consequence)
        }
        _ => false,
    }
}

/// To be called by a rank whose run has failed. One that has only noticed that another is gone lets the launcher show
/// the reason first, which then ends this rank by SIGTERM: `is_stopped` says whether that has come.
pub(crate) fn wait_for_launcher(error: &Error, is_stopped: impl Fn() -> bool) {
    if !is_consequence(error) || std::env::var_os(LAUNCHER).is_none() {
        return;
    }
    let deadline = Instant::now() + PATIENCE;
    while !is_stopped() && Instant::now() < deadline {
        std::thread::sleep(POLL);
    }
}

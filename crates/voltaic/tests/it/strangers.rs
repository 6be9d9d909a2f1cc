//! What processes that do not belong to a job can do to it.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use voltaic::callback::Callback;
use voltaic::distributed::{JobSecret, RankPlacement, World};
use voltaic::module::HookContext;
use voltaic::{Device, Module};

use crate::ddp::{FOLDER, Net, alone, assert_same, builder, finish, folder_of_parent, loaders, weights};
use crate::distributed::{free_port, placement};
use crate::probe::{own_process, plays, text_of};

/// Local addresses on which a process listens, as `/proc/net/tcp` writes them.
fn listens_at(process: &str) -> BTreeSet<String> {
    let address = |place: String| place.split(':').next().unwrap_or_default().to_owned();
    listens(process).into_iter().map(address).collect()
}

/// The same with the ports.
fn listens(process: &str) -> BTreeSet<String> {
    let Ok(open) = std::fs::read_dir(format!("/proc/{process}/fd")) else { return BTreeSet::new() };
    let links = open.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let inodes: BTreeSet<String> = links
        .filter_map(|link| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let tables = ["tcp", "tcp6"].map(|table| std::fs::read_to_string(format!("/proc/{process}/net/{table}")));
    let lines: Vec<String> = tables
        .into_iter()
        .flatten()
        .flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>())
        .collect();
    let listening = lines.iter().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_own = fields.get(3) == Some(&"0A") && inodes.contains(*fields.get(9)?);
        is_own.then(|| fields[1].to_owned())
    });
    listening.collect()
}

#[test]
fn ranks_of_one_host_listen_on_loopback_alone_and_share_a_secret() {
    if plays("two ranks") {
        let trainer = builder(&folder_of_parent()).devices(2).build().unwrap();
        let launcher = std::os::unix::process::parent_id().to_string();
        println!("\nrank {} listens at {:?}", trainer.world().rank, listens_at("self"));
        println!("the launcher listens at {:?}", listens_at(&launcher));
        let secret = std::env::var("VOLTAIC_JOB_SECRET").unwrap();
        assert_eq!(secret.len(), 64);
        for process in ["self", &launcher] {
            let line = std::fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap();
            assert!(!line.contains(&secret), "{line}");
        }
        return trainer.world().barrier().unwrap();
    }
    let folder = TempDir::new().unwrap();
    // an address that all can reach changes nothing
    let mut command = own_process("two ranks");
    let text = text_of(&command.env(FOLDER, folder.path()).env("MASTER_ADDR", "0.0.0.0").output().unwrap());
    for expected in [r#"rank 0 listens at {"0100007F"}"#, r#"the launcher listens at {"0100007F"}"#] {
        assert!(text.contains(expected), "{text}");
    }
}

/// Waits within training until the ports of its process have been attacked.
struct IsAttacked;

impl Callback for IsAttacked {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        if (ctx.current_epoch(), ctx.batch_idx()) == (0, 1) {
            let (folder, rank) = (folder_of_parent(), ctx.process_group().unwrap().rank());
            // further groups have ports of their own
            let _group = ctx.process_group().unwrap().new_group(&[1, 0])?.unwrap();
            let ports = listens("self").into_iter().collect::<Vec<_>>().join(" ");
            std::fs::write(folder.join(format!("ports_{rank}.tmp")), ports)?;
            std::fs::rename(folder.join(format!("ports_{rank}.tmp")), folder.join(format!("ports_{rank}")))?;
            while !folder.join("attacked").exists() {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(())
    }
}

#[test]
fn connections_to_the_port_of_a_rank_do_not_end_it() {
    if plays("attacked") {
        let folder = folder_of_parent();
        let mut trainer = builder(&folder).devices(2).callback(IsAttacked).build().unwrap();
        let mut net = Net::new();
        trainer.fit(&mut net, &mut loaders(None)).unwrap();
        return finish(&trainer, &net, &folder);
    }
    let folder = TempDir::new().unwrap();
    let own = own_process("attacked");
    let mut command = Command::new("sh"); // few descriptors, as a user has by default
    command.args(["-c", "ulimit -n 1024; exec \"$@\"", "sh"]).arg(own.get_program()).args(own.get_args());
    command.envs(own.get_envs().filter_map(|(key, value)| Some((key, value?)))).env(FOLDER, folder.path());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut kept = Vec::new();
    for rank in 0..2 {
        let file = folder.path().join(format!("ports_{rank}"));
        let deadline = Instant::now() + Duration::from_secs(60);
        while !file.exists() {
            assert!(Instant::now() < deadline, "rank {rank} does not train");
            std::thread::sleep(Duration::from_millis(20));
        }
        let text = std::fs::read_to_string(file).unwrap();
        let ports: Vec<u16> = text
            .split_whitespace()
            .map(|place| u16::from_str_radix(place.split_once(':').unwrap().1, 16).unwrap())
            .collect();
        assert!(ports.len() >= 2, "those of two groups: {text}");
        for port in ports {
            kept.extend(attack(port));
        }
    }
    std::fs::write(folder.path().join("attacked"), "").unwrap();
    let output = child.wait_with_output().unwrap();
    println!("{} connections were accepted", kept.len());
    text_of(&output);
    let (_kept, expected, ..) = alone(2, 1);
    assert_same(&weights(folder.path()), &expected);
}

/// Opens 1200 connections at once and sends something over those that open: what Gloo's own ranks send first, and other bytes.
fn attack(port: u16) -> Vec<TcpStream> {
    let address = ([127, 0, 0, 1], port).into();
    let open = |number: u64| -> Option<TcpStream> {
        let mut stream =
            TcpStream::connect_timeout(&address, Duration::from_millis(if number < 2 { 500 } else { 2 }))
                .ok()?;
        let bytes = [number.to_ne_bytes(), [0xff; 8], [0; 8], (number << 33).to_ne_bytes()].concat();
        let _ = stream.write_all(&bytes[..8 * (1 + number as usize % 4)]);
        Some(stream)
    };
    (0..1200).filter_map(open).collect()
}

#[test]
fn the_secret_is_not_shown() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
    let output = command.args(["env", "--json"]).env("VOLTAIC_JOB_SECRET", "correct-horse").output().unwrap();
    let text = text_of(&output);
    assert!(text.contains("VOLTAIC_JOB_SECRET") && !text.contains("correct-horse"), "{text}");
}

#[test]
fn a_process_of_another_job_is_no_rank_of_this_one() {
    const NUMBER: &str = "VOLTAIC_TEST_NUMBER";
    if plays("one of them") {
        let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
        let (rank, secret) = [(0, Some("a")), (1, None), (1, Some("b")), (1, Some("a"))][number(NUMBER)];
        let own = placement(rank, 2, number("MASTER_PORT") as u16);
        let own = RankPlacement { secret: secret.map(JobSecret::of), ..own };
        match World::join(&own, Device::Cpu, Duration::from_secs(30)) {
            Ok(_) => println!("\njoined"),
            Err(error) => println!("\nrefused: {error}"),
        }
        if rank == 0 {
            std::io::read_to_string(std::io::stdin()).unwrap();
        }
        return;
    }
    let port = free_port();
    let start = |number: usize| {
        let mut command = own_process("one of them");
        command.env(NUMBER, number.to_string()).env("MASTER_PORT", port.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let text = |process: std::process::Child| text_of(&process.wait_with_output().unwrap());
    let first = start(0);
    for stranger in [1, 2].map(start).map(text) {
        assert!(
            stranger.contains("rank 0 has another VOLTAIC_JOB_SECRET, or belongs to another job"),
            "{stranger}"
        );
    }
    assert_contains!(text(start(3)), "joined");
    assert!(text(first).contains("joined"));
}

/// A rank that finds something else at its address.
fn ends_in_time(port: u16, expected: &str) {
    let started = Instant::now();
    let error =
        World::join(&placement(1, 2, port), Device::Cpu, Duration::from_secs(1)).unwrap_err().to_string();
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    assert!(error.contains(expected), "{error}");
}

#[test]
fn a_port_on_which_nothing_listens_is_told() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    ends_in_time(port, "nothing accepts connections (Connection refused");
}

#[test]
fn a_server_that_accepts_and_stays_silent_is_not_waited_for() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let accepts = listener.try_clone().unwrap();
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        while let Ok((stream, _)) = accepts.accept() {
            kept.push(stream);
        }
    });
    ends_in_time(
        listener.local_addr().unwrap().port(),
        "accepts connections, and does not answer as a store does",
    );
}

#[test]
fn a_server_that_answers_with_something_else_is_told() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let accepts = listener.try_clone().unwrap();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = accepts.accept() {
            let _ = stream.read(&mut [0; 64]);
            let _ = std::io::Write::write_all(&mut stream, b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    ends_in_time(listener.local_addr().unwrap().port(), "could not join the others");
}

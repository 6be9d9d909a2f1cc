//! Names and addresses of hosts.

use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener};

use crate::error::ConfigError;
use crate::ffi::{GlooInterface, Listen};
use crate::swap::raise_open_files;

/// Files that a process opens to be connected to ranks, beside one for each.
const OPEN_FILES: u64 = 24;

/// The address of this host that no other host reaches.
pub(super) const LOOPBACK: &str = "127.0.0.1";

/// Whether a name or address always means this host.
pub(super) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Where the server of a store listens: on the loopback interface if `host` is a loopback address, else on all interfaces, since a
/// rank may connect to any. The name of a host does not count: it may be a loopback address on this host only.
pub(super) fn listen(host: &str, port: u16) -> io::Result<Listen> {
    if !is_loopback(host) {
        return Ok(Listen::Everywhere);
    }
    let address = host.parse().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    Ok(Listen::At(TcpListener::bind((address, port))?))
}

/// A launcher or a rank with too few open files would wait for a connection that cannot be, and name a wrong address.
pub(super) fn check_open_files(world_size: usize) -> Result<(), ConfigError> {
    let Some(limit) = raise_open_files() else { return Ok(()) };
    let open = std::fs::read_dir("/proc/self/fd").map_or(limit, |files| files.count() as u64);
    let needed = open.saturating_add(OPEN_FILES).saturating_add(world_size as u64);
    if needed <= limit {
        return Ok(());
    }
    let what =
        format!("{world_size} rank(s), but this process may have {limit} open files, and needs {needed}");
    let remedy = format!("raise the limit: ulimit -n {}", needed.next_multiple_of(1024));
    Err(ConfigError::new("trainer.devices", what, remedy))
}

/// The name of this host, for messages.
pub(super) fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "unknown host".to_owned(), |name| name.trim().to_owned())
}

/// Where Gloo listens: on the interface that `GLOO_SOCKET_IFNAME` names, else on the one from which this host reaches
/// the rendezvous. The host's own name does not help, since it often stands for a loopback address.
pub(super) fn gloo_interface(named: Option<String>, host: &str, port: u16) -> Result<GlooInterface, String> {
    use std::net::UdpSocket;
    if let Some(name) = named {
        return Ok(GlooInterface::Name(name));
    }
    let reached = |address: std::net::SocketAddr| -> std::io::Result<std::net::IpAddr> {
        let any = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = UdpSocket::bind(any)?;
        socket.connect(address)?; // chooses a route; nothing is sent
        Ok(socket.local_addr()?.ip())
    };
    let addresses =
        std::net::ToSocketAddrs::to_socket_addrs(&(host, port)).map_err(|error| error.to_string())?;
    let found = addresses.into_iter().find_map(|address| reached(address).ok());
    found
        .map(|address| GlooInterface::Address(address.to_string()))
        .ok_or_else(|| format!("there is no route to {host}"))
}

/// The first host of a list; `None` if it is empty or has an open bracket.
pub(super) fn first_host(list: &str) -> Option<String> {
    let first = split_outside_brackets(list.trim()).into_iter().next()?;
    let Some((prefix, rest)) = first.split_once('[') else {
        return Some(first.to_owned()).filter(|h| !h.is_empty());
    };
    let (numbers, suffix) = rest.split_once(']')?;
    let number = numbers.split([',', '-']).next().filter(|number| !number.is_empty())?;
    // a name may have several ranges
    first_host(&format!("{prefix}{number}{suffix}"))
}

fn split_outside_brackets(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, c) in list.char_indices() {
        match c {
            '[' => depth += 1,
            ']' => depth -= 1,
            ',' | ' ' if depth == 0 => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::first_host;

    #[test]
    fn the_first_host_of_a_list() {
        for (list, expected) in [
            ("alpha", Some("alpha")),
            ("alpha,beta,gamma", Some("alpha")),
            ("alpha beta gamma", Some("alpha")),
            ("host[5-9]", Some("host5")),
            ("alpha[01-03,07],beta", Some("alpha01")),
            ("rack[2,4]n[10-11].local", Some("rack2n10.local")),
            ("", None),
            ("host[5", None),
        ] {
            assert_eq!(first_host(list).as_deref(), expected, "{list}");
        }
    }
}

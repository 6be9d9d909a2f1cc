//! Sockets of this process on which it accepts connections.

use std::collections::BTreeMap;
use std::mem;
use std::os::fd::RawFd;

/// Listening sockets: their inodes by descriptor, since a later socket may have the same descriptor.
#[derive(Debug, Default)]
pub struct Listeners(BTreeMap<RawFd, u64>);

impl Listeners {
    /// Those that there are now.
    pub fn now() -> Self {
        let open = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
        let found = open.filter_map(|entry| {
            let fd: RawFd = entry.file_name().to_str()?.parse().ok()?;
            let link = std::fs::read_link(entry.path()).ok()?;
            let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()?;
            accepts(fd).then_some((fd, inode))
        });
        Self(found.collect())
    }

    /// Has the system drop new connections to sockets that were not there `before`, without waking the process. Existing connections
    /// are kept. Returns the number of these sockets.
    pub fn close_to_others(&self, before: &Self) -> usize {
        let is_new = |(fd, inode): &(&RawFd, &u64)| before.0.get(*fd) != Some(*inode);
        self.0.iter().filter(is_new).filter(|(fd, _)| drop_packets(**fd)).count()
    }
}

fn accepts(fd: RawFd) -> bool {
    let mut value: libc::c_int = 0;
    let mut length = mem::size_of::<libc::c_int>() as libc::socklen_t;
    let (value_at, length_at) = ((&raw mut value).cast(), &raw mut length);
    // SAFETY: both pointers are to values that live through the call, and `length` is the size of `value`; of a descriptor that is no
    // socket or has been closed the call makes an error.
    let result = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN, value_at, length_at) };
    result == 0 && value != 0
}

/// A filter of one instruction, which keeps no byte of any packet.
fn drop_packets(fd: RawFd) -> bool {
    let mut keep_none = libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 };
    let program = libc::sock_fprog { len: 1, filter: &raw mut keep_none };
    let length = mem::size_of::<libc::sock_fprog>() as libc::socklen_t;
    // SAFETY: the pointer is to a program of `length` bytes, whose one instruction lives through the call, in which the system copies
    // both.
    let result = unsafe {
        libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, (&raw const program).cast(), length)
    };
    result == 0
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_new_listeners_are_closed_and_connections_stay() {
        let old = TcpListener::bind("127.0.0.1:0").expect("a port");
        let before = Listeners::now();
        let new = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = new.local_addr().expect("an address");
        let mut connected = TcpStream::connect(address).expect("open");
        let (mut accepted, _) = new.accept().expect("a connection");
        assert_eq!(Listeners::now().close_to_others(&before), 1);
        let limit = Duration::from_millis(300);
        assert!(TcpStream::connect_timeout(&address, limit).is_err(), "closed to others");
        TcpStream::connect_timeout(&old.local_addr().expect("an address"), limit).expect("not its business");
        std::io::Write::write_all(&mut connected, b"still").expect("connected");
        let mut text = [0; 5];
        std::io::Read::read_exact(&mut accepted, &mut text).expect("connected");
        assert_eq!(&text, b"still");
    }
}

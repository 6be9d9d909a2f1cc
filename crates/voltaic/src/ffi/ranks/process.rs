//! Child processes that must not outlive their parent.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// Has the system kill the child when the thread that starts it ends, however it does.
pub fn die_with_parent(command: &mut Command) {
    let parent = std::process::id();
    // SAFETY: the closure runs between fork and exec; prctl, getppid and the error's making allocate nothing and take no
    // lock.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // the parent may have ended before the line above
            if libc::getppid() as u32 != parent {
                return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
}

/// Whether this process was started to ignore a signal, as `nohup` does with SIGHUP.
pub fn ignores(signal: i32) -> bool {
    is_in_mask("SigIgn:", signal)
}

/// Whether a signal does something else in this process than its default action.
pub fn handles_or_ignores(signal: i32) -> bool {
    is_in_mask("SigCgt:", signal) || ignores(signal)
}

fn is_in_mask(name: &str, signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix(name));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask & (1 << (signal - 1)) != 0
}

/// Sends a signal to a process group, that of a child started with a group of its own; one that has ended is not a mistake.
pub fn signal_group(leader: u32, signal: i32) {
    if let Ok(leader) = i32::try_from(leader)
        && leader > 1
    {
        // SAFETY: takes integers; a negative id above 1 in size names one process group, never all processes.
        unsafe { libc::kill(-leader, signal) };
    }
}

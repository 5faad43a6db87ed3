//! What the system says of a calling thread: its process, and how long it may make a file. A direct
//! write does nothing that the kernel would not let the caller do with write(2).

use std::fs::File;
use std::io::Read;

/// The longest that a thread, or a process, may make a file, in bytes (`RLIMIT_FSIZE`); no limit
/// where it cannot be asked. `thread` must name it and no other: of a request that has not been
/// answered, or a process that is known to be alive.
///
/// It is asked for each write: a process may change its limits between two. prlimit(2) takes a
/// twentieth of the time of `/proc`, but about processes of other users it wants a privilege that
/// the daemon has no other use for.
pub fn file_size_limit(thread: u32) -> u64 {
    by_call(thread).or_else(|| by_proc(thread)).unwrap_or(u64::MAX)
}

/// The limit as prlimit(2) tells it; none where this process may not ask.
#[allow(unsafe_code)]
fn by_call(thread: u32) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // 0 is this process itself.
    let thread = i32::try_from(thread).ok().filter(|thread| *thread > 0)?;
    // SAFETY: the kernel takes no new limit, and writes one such structure.
    let result = unsafe { libc::prlimit(thread, libc::RLIMIT_FSIZE, std::ptr::null(), &raw mut limit) };
    (result == 0).then_some(limit.rlim_cur)
}

/// The limit as `/proc/THREAD/limits` tells it; none where there is none.
fn by_proc(thread: u32) -> Option<u64> {
    // It is the second line.
    parse(&start_of(&format!("/proc/{thread}/limits")).ok()?)
}

/// The first lines of a file of `/proc`, 1 KiB of them, in one call: a file whose length nobody
/// tells takes many to be read whole.
pub(crate) fn start_of(path: &str) -> std::io::Result<String> {
    let mut start = [0; 1024];
    let len = File::open(path)?.read(&mut start)?;
    Ok(String::from_utf8_lossy(&start[..len]).into_owned())
}

/// The process of a thread that waits for an answer; the thread itself where that cannot be asked.
pub fn process_of(thread: u32) -> u32 {
    // It is the fourth line.
    let status = start_of(&format!("/proc/{thread}/status")).unwrap_or_default();
    let process = status.lines().find_map(|line| line.strip_prefix("Tgid:")).and_then(|id| id.trim().parse().ok());
    process.unwrap_or(thread)
}

/// The soft limit. None where there is none (fs/proc/base.c, `proc_pid_limits`).
fn parse(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max file size"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_counts() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max cpu time              unlimited            unlimited            seconds   \n\
                      Max file size             1048576              unlimited            bytes     \n";
        assert_eq!(parse(limits), Some(1 << 20));
        assert_eq!(parse("Max file size             unlimited            unlimited            bytes     \n"), None);
        assert_eq!(parse(""), None);
    }

    /// What was asked before never counts.
    #[test]
    fn a_limit_is_the_one_of_now_in_whichever_way_it_is_asked() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let id = child.id();
        let set = |limit: &str| {
            let mut prlimit = std::process::Command::new("prlimit");
            assert!(prlimit.args(["--pid", &id.to_string(), &format!("--fsize={limit}:unlimited")]).status().unwrap().success());
        };
        for limit in [12345, 7, 1 << 40] {
            set(&limit.to_string());
            assert_eq!([by_call(id), by_proc(id), Some(file_size_limit(id))], [Some(limit); 3]);
        }
        set("unlimited");
        assert_eq!((by_call(id), by_proc(id), file_size_limit(id)), (Some(u64::MAX), None, u64::MAX));
        child.kill().unwrap();
        child.wait().unwrap();
        for gone in [id, 0] {
            assert_eq!((by_call(gone), by_proc(gone), file_size_limit(gone)), (None, None, u64::MAX));
        }
    }
}

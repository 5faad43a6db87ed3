//! What `/proc` says of a calling thread: its process, and how long it may make a file. A direct
//! write does nothing that the kernel would not let the caller do with write(2).

/// The longest that a thread, or a process, may make a file, in bytes (`RLIMIT_FSIZE`); no limit
/// where it cannot be asked. `thread` must name it and no other: of a request that has not been
/// answered, or a process that is known to be alive.
///
/// Read from `/proc`: prlimit(2) wants a privilege for other users' processes that the daemon has
/// no other use for.
pub fn file_size_limit(thread: u32) -> u64 {
    let limits = std::fs::read_to_string(format!("/proc/{thread}/limits")).unwrap_or_default();
    parse(&limits).unwrap_or(u64::MAX)
}

/// The process of a thread that waits for an answer; the thread itself where that cannot be asked.
pub fn process_of(thread: u32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
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
        assert_eq!(file_size_limit(0), u64::MAX, "there is no such process");
    }
}

//! The limits that the daemon runs under.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::error::MountError;

/// Descriptors for the device, the registration socket and a few clients.
const DESCRIPTORS: u64 = 128;
/// Descriptors of a loop: its connection to the kernel, and its queue of the device.
const DESCRIPTORS_PER_LOOP: u64 = 4;

/// File with the value that the kernel adds to a process's share of memory, in thousandths, when it
/// looks for a process to kill (proc_pid_oom_score_adj(5)).
const OOM_SCORE: &str = "/proc/self/oom_score_adj";
const OOM_PROTECTION: &str = "-900";

/// Raises the limit of open files (`RLIMIT_NOFILE`) as far as the caller may: clients that
/// register buffers and rings cost descriptors.
///
/// # Errors
/// If it stays below what a mount with so many loops needs by itself.
pub fn raise_descriptors(loops: usize) -> Result<(), MountError> {
    let needed = DESCRIPTORS + loops as u64 * DESCRIPTORS_PER_LOOP;
    let limit = getrlimit(Resource::Nofile);
    let hard = limit.maximum.unwrap_or(u64::MAX);
    // Root may raise the hard limit too.
    let attempts = [hard.max(needed), hard].map(|files| setrlimit(Resource::Nofile, limit_of(files)));
    if attempts[0].is_err() && hard < needed {
        let why = format!("at most {hard} files may be open (RLIMIT_NOFILE), and {loops} threads need {needed}");
        return Err(MountError::System(why));
    }
    Ok(())
}

/// Makes the kernel prefer other processes when memory runs out: the daemon's end is the end of its
/// mount, for all that use it. The score is not `-1000`, which would spare the daemon however much
/// it takes: this is nine tenths of the machine's memory, or of its cgroup's. A score that an
/// administrator has set already, for a service or a container, stays.
pub fn protect_from_oom() {
    let set = std::fs::read_to_string(OOM_SCORE).is_ok_and(|value| value.trim() != "0");
    if !set && let Err(error) = std::fs::write(OOM_SCORE, OOM_PROTECTION) {
        tracing::debug!("{OOM_SCORE}: {error}");
    }
}

fn limit_of(files: u64) -> Rlimit {
    let files = Some(files).filter(|files| *files != u64::MAX);
    Rlimit { current: files, maximum: files }
}

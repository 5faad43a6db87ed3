//! The filter of system calls: which calls the daemon may make once it serves, for all of its
//! threads and for good (seccomp(2)).
//!
//! The daemon reads data that clients and devices wrote, with the privileges of root. Should one of
//! them ever make it run injected code, that code starts no program, attaches to no process, mounts
//! nothing, loads nothing into the kernel and maps no memory that can be executed.
//! `docs/reference/security.md` says what the remaining calls can do.
//!
//! A call that is not listed fails with `ENOSYS`, as on a kernel without it: libraries have
//! another way then, and a path that no test has taken costs no mount. In a debug build it ends
//! the process, so that tests find every call that is missing here.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
    apply_filter_all_threads,
};

/// Calls that are harmless with any argument, or that the daemon cannot work without.
const CALLS: &[libc::c_long] = &[
    // Files: the device, /dev/fuse, /proc and /sys, buffers of clients; the socket's name is
    // removed at the end.
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_readlinkat,
    libc::SYS_lgetxattr,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_chdir,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_unlinkat,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync_file_range,
    libc::SYS_syncfs,
    libc::SYS_fadvise64,
    libc::SYS_flock,
    libc::SYS_fcntl,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_pipe2,
    libc::SYS_splice,
    libc::SYS_tee,
    libc::SYS_vmsplice,
    libc::SYS_memfd_create,
    // The end of the mount.
    libc::SYS_umount2,
    // I/O and waiting.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // Signals of rings, where io_uring is switched off.
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_io_getevents,
    libc::SYS_io_setup,
    libc::SYS_io_destroy,
    libc::SYS_io_submit,
    libc::SYS_io_getevents,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    // Clients: connections to the registration socket, and descriptors out of processes that
    // register by ioctl.
    libc::SYS_accept4,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_shutdown,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    // Memory, but for what could be executed.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_msync,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_munlock,
    libc::SYS_brk,
    libc::SYS_get_mempolicy,
    libc::SYS_membarrier,
    // Threads and signals of this process.
    libc::SYS_clone3,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_rseq,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_restart_syscall,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_getcpu,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_sigsuspend,
    libc::SYS_sigaltstack,
    // Identity of the process and of the machine.
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_setsid,
    libc::SYS_getrlimit,
    libc::SYS_getrusage,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_getrandom,
];

/// Older forms of the same calls, which 64-bit ARM never had.
#[cfg(target_arch = "x86_64")]
const OLDER_CALLS: &[libc::c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_unlink,
    libc::SYS_dup2,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_epoll_wait,
    libc::SYS_time,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER_CALLS: &[libc::c_long] = &[];

/// `FUSE_DEV_IOC_CLONE` (linux/fuse.h): a loop's own connection to the kernel.
const FUSE_DEV_IOC_CLONE: u64 = 0x8004_e500;
/// The ioctls of VFIO and of its container: `_IO(';', 100)` to `_IO(';', 159)` (linux/vfio.h).
const VFIO: (u64, u64) = (0x3b64, 0x3b9f);
/// `BLKSSZGET` (linux/fs.h) and `LOOP_GET_STATUS64` (linux/loop.h), which only tell: of block
/// devices that a volume is given while it is mounted.
const BLOCK_DEVICE_IOCTLS: [u64; 2] = [0x1268, 0x4c05];
/// Ioctls that the standard library uses on descriptors.
const DESCRIPTOR_IOCTLS: [u64; 3] = [libc::FIONBIO, libc::FIOCLEX, libc::FIONREAD];

/// Refuses all other calls from now on, to all threads that there are and will be.
///
/// # Errors
/// The kernel has no such filters.
pub fn apply() -> io::Result<()> {
    let missing = if cfg!(debug_assertions) { SeccompAction::KillProcess } else { SeccompAction::Errno(libc::ENOSYS as u32) };
    apply_with(missing)
}

fn apply_with(missing: SeccompAction) -> io::Result<()> {
    let refused = |error: seccompiler::BackendError| io::Error::other(error);
    let arch: TargetArch = std::env::consts::ARCH.try_into().map_err(refused)?;
    let no_clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    // The C library makes threads by clone3(2), whose flags a filter cannot see, and on ENOSYS by
    // clone(2).
    let first = SeccompFilter::new(no_clone3, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32), arch);
    let second = SeccompFilter::new(rules().map_err(refused)?, missing, SeccompAction::Allow, arch);
    for filter in [first, second] {
        let program: seccompiler::BpfProgram = filter.and_then(TryInto::try_into).map_err(refused)?;
        apply_filter_all_threads(&program).map_err(io::Error::other)?;
    }
    Ok(())
}

/// The calls that are allowed, and the arguments that they are allowed with.
fn rules() -> Result<BTreeMap<libc::c_long, Vec<SeccompRule>>, seccompiler::BackendError> {
    let mut rules: BTreeMap<_, _> = CALLS.iter().chain(OLDER_CALLS).map(|call| (*call, Vec::new())).collect();
    let word = |argument, operator, value| SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value);
    let rule = |condition: SeccompCondition| SeccompRule::new(vec![condition]);

    // Memory that is not executable, neither from the start nor later.
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![rule(word(2, SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64), 0)?)?]);
    }
    // Threads, and no processes or namespaces.
    let namespaces = libc::CLONE_NEWNS | libc::CLONE_NEWUSER | libc::CLONE_NEWPID | libc::CLONE_NEWNET | libc::CLONE_NEWIPC;
    let thread = libc::CLONE_THREAD as u64;
    rules.insert(libc::SYS_clone, vec![rule(word(0, SeccompCmpOp::MaskedEq(namespaces as u64 | thread), thread)?)?]);
    // Signals to itself: abort(3) after a panic.
    rules.insert(libc::SYS_tgkill, vec![rule(word(0, SeccompCmpOp::Eq, std::process::id().into())?)?]);
    // The names of threads and of memory.
    let names = [libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_VMA];
    let named = names.map(|option| word(0, SeccompCmpOp::Eq, option as u64).and_then(rule));
    rules.insert(libc::SYS_prctl, named.into_iter().collect::<Result<_, _>>()?);
    // Limits are read, of clients too, and not set.
    let old = SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
    rules.insert(libc::SYS_prlimit64, vec![rule(old)?]);

    let single = DESCRIPTOR_IOCTLS.into_iter().chain(BLOCK_DEVICE_IOCTLS).chain([FUSE_DEV_IOC_CLONE]);
    let mut ioctls = single.map(|request| word(1, SeccompCmpOp::Eq, request).and_then(rule)).collect::<Result<Vec<_>, _>>()?;
    ioctls.push(SeccompRule::new(vec![word(1, SeccompCmpOp::Ge, VFIO.0)?, word(1, SeccompCmpOp::Le, VFIO.1)?])?);
    rules.insert(libc::SYS_ioctl, ioctls);
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::mpsc::channel;

    use super::*;

    /// In a process of its own: the filter stays.
    const INSIDE: &str = "GPUNVME_FILTERED";

    #[test]
    fn an_escape_is_refused_to_every_thread() {
        if std::env::var_os(INSIDE).is_some() {
            return escape();
        }
        let itself = "daemon::filter::tests::an_escape_is_refused_to_every_thread";
        let mut child = Command::new(std::env::current_exe().unwrap());
        let output = child.args([itself, "--exact", "--nocapture"]).env(INSIDE, "1").output().unwrap();
        let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        assert!(output.status.success() && text.contains("escaped nowhere"), "{}: {text}", output.status);
    }

    fn escape() {
        let (go, wait) = channel::<()>();
        let older = std::thread::spawn(move || {
            wait.recv().unwrap();
            refused_calls()
        });
        apply_with(SeccompAction::Errno(libc::ENOSYS as u32)).unwrap();
        go.send(()).unwrap();
        let younger = std::thread::Builder::new().name("younger".into()).spawn(refused_calls).unwrap();
        for thread in [older, younger] {
            assert_eq!(thread.join().unwrap(), Vec::<&str>::new(), "these were not refused");
        }
        assert!(Command::new("/bin/true").status().is_err());
        assert!(std::net::TcpListener::bind("127.0.0.1:0").is_err());
        // The calls that the daemon needs still work.
        let memory = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 1 << 20).unwrap();
        std::fs::read_to_string("/proc/self/status").unwrap();
        drop(vec![0_u8; 64 << 20]);
        println!("escaped nowhere");
    }

    /// The calls of an intruder that fail with anything but `ENOSYS`. None of them could do harm
    /// if it were let through.
    fn refused_calls() -> Vec<&'static str> {
        let executable = (libc::PROT_READ | libc::PROT_EXEC) as libc::c_long;
        let private = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as libc::c_long;
        let calls: &[(&str, libc::c_long, [libc::c_long; 6])] = &[
            ("execve", libc::SYS_execve, [0; 6]),
            ("execveat", libc::SYS_execveat, [-1, 0, 0, 0, 0, 0]),
            ("ptrace", libc::SYS_ptrace, [libc::PTRACE_ATTACH as _, libc::c_long::MAX, 0, 0, 0, 0]),
            ("process_vm_writev", libc::SYS_process_vm_writev, [libc::c_long::MAX, 0, 0, 0, 0, 0]),
            ("kill", libc::SYS_kill, [libc::c_long::from(std::process::id()), 0, 0, 0, 0, 0]),
            ("tgkill", libc::SYS_tgkill, [1, 1, 0, 0, 0, 0]),
            ("fork", libc::SYS_clone, [(libc::SIGCHLD | libc::CLONE_NEWUSER) as _, 0, 0, 0, 0, 0]),
            ("clone3", libc::SYS_clone3, [0; 6]),
            ("unshare", libc::SYS_unshare, [0; 6]),
            ("setns", libc::SYS_setns, [-1, 0, 0, 0, 0, 0]),
            ("mount", libc::SYS_mount, [0; 6]),
            ("fsopen", libc::SYS_fsopen, [0; 6]),
            ("move_mount", libc::SYS_move_mount, [-1, 0, -1, 0, 0, 0]),
            ("open_tree", libc::SYS_open_tree, [-1, 0, 0, 0, 0, 0]),
            ("pivot_root", libc::SYS_pivot_root, [0; 6]),
            ("chroot", libc::SYS_chroot, [0; 6]),
            ("bpf", libc::SYS_bpf, [-1, 0, 0, 0, 0, 0]),
            ("perf_event_open", libc::SYS_perf_event_open, [0, -1, -1, -1, 0, 0]),
            ("init_module", libc::SYS_init_module, [0; 6]),
            ("finit_module", libc::SYS_finit_module, [-1, 0, 0, 0, 0, 0]),
            ("kexec_load", libc::SYS_kexec_load, [0, 0, 0, -1, 0, 0]),
            ("reboot", libc::SYS_reboot, [0; 6]),
            ("swapon", libc::SYS_swapon, [0; 6]),
            ("keyctl", libc::SYS_keyctl, [-1, 0, 0, 0, 0, 0]),
            ("userfaultfd", libc::SYS_userfaultfd, [-1, 0, 0, 0, 0, 0]),
            ("open_by_handle_at", libc::SYS_open_by_handle_at, [-1, 0, 0, 0, 0, 0]),
            ("socket", libc::SYS_socket, [libc::AF_INET.into(), libc::SOCK_STREAM.into(), 0, 0, 0, 0]),
            ("setuid", libc::SYS_setuid, [-1, 0, 0, 0, 0, 0]),
            ("capset", libc::SYS_capset, [0; 6]),
            ("chmod", libc::SYS_fchmodat, [-1, 0, 0, 0, 0, 0]),
            ("symlink", libc::SYS_symlinkat, [0, -1, 0, 0, 0, 0]),
            ("prctl", libc::SYS_prctl, [libc::PR_SET_DUMPABLE.into(), 1, 0, 0, 0, 0]),
            ("prlimit64", libc::SYS_prlimit64, [0, libc::RLIMIT_NOFILE as _, 1, 0, 0, 0]),
            ("TIOCSTI", libc::SYS_ioctl, [-1, libc::TIOCSTI as _, 0, 0, 0, 0]),
            ("executable memory", libc::SYS_mmap, [0, 4096, executable, private, -1, 0]),
            ("memory made executable", libc::SYS_mprotect, [0, 0, executable, 0, 0, 0]),
        ];
        let refused = |call: &libc::c_long, a: &[libc::c_long; 6]| {
            // SAFETY: no argument is a pointer to memory of this process, so nothing of it changes
            // whatever the call does.
            #[allow(unsafe_code)]
            let result = unsafe { libc::syscall(*call, a[0], a[1], a[2], a[3], a[4], a[5]) };
            result == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS)
        };
        calls.iter().filter(|(_, call, arguments)| !refused(call, arguments)).map(|(name, ..)| *name).collect()
    }
}

//! Clients that attack a mount as users without rights: the test program runs itself once more, as
//! that user, to carry out an attack by its name. Both ends talk in lines over a socket, so that a
//! test decides when an attack begins and learns how far it came.
//!
//! A test program has one table of attacks, and one test named `each_attack_has_a_name_of_its_own`.
//! That test checks the table, and in the other process carries the attack out:
//!
//! ```ignore
//! #[test]
//! fn each_attack_has_a_name_of_its_own() {
//!     attack::check_or_carry_out(&[registration::ATTACKS]);
//! }
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use crate::mounted::{Image, Mounted};

/// A user without rights, `nobody` on most systems.
pub const NOBODY: u32 = 65534;
/// Another user without rights.
pub const STRANGER: u32 = 65533;

/// How long either end waits for the other.
const PATIENCE: Duration = Duration::from_secs(60);
/// The test that carries out attacks.
const TEST: &str = "each_attack_has_a_name_of_its_own";
const NAME: &str = "GPUNVME_ATTACK";
const ROOT: &str = "GPUNVME_ATTACKED";

/// The code of an attacker. It may panic: the test then fails.
pub type Attack = fn(&mut Attacker);

/// A table of attacks, by the names of their functions: `attacks![flood, starve]`.
#[macro_export]
macro_rules! attacks {
    ($($attack:ident),* $(,)?) => {
        &[$((stringify!($attack), $attack as $crate::attack::Attack)),*]
    };
}

/// A fresh volume that every user may reach, write to and attack, mounted with `options`.
pub fn volume(options: &str) -> Mounted {
    volume_of(Image::formatted(), options)
}

/// As [`volume`], of an image.
pub fn volume_of(image: Image, options: &str) -> Mounted {
    let folder = image.path().parent().expect("an image lies in a folder").to_owned();
    let mounted = image.mount_with(options);
    let allow = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("permissions");
    allow(&folder, 0o755);
    allow(&mounted.root(), 0o1777);
    mounted
}

/// The attacker's own view: it runs in a process of its own.
#[derive(Debug)]
pub struct Attacker {
    root: PathBuf,
    test: Lines,
}

impl Attacker {
    /// A path inside the mount.
    pub fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.root.join(relative)
    }

    /// The mount's root, open for ioctls.
    pub fn root(&self) -> File {
        File::open(&self.root).expect("the root of the mount")
    }

    /// Sends a line to the test.
    pub fn say(&mut self, line: impl std::fmt::Display) {
        self.test.say(line);
    }

    /// What the test says next.
    pub fn hear(&mut self) -> String {
        self.test.hear()
    }

    /// Waits until the test says so.
    pub fn wait_for(&mut self, line: &str) {
        assert_eq!(self.hear(), line);
    }
}

/// A running attack, as the test sees it. Dropped, it is killed.
#[derive(Debug)]
pub struct RunningAttack {
    process: Child,
    attacker: Lines,
}

impl RunningAttack {
    /// Begins an attack on a mount by a user, who has a group of the same number, no other group,
    /// and no capability.
    pub fn begin(volume: &Mounted, user: u32, attack: &str) -> RunningAttack {
        let (ours, theirs) = UnixStream::pair().expect("a socket");
        // By this name, because the program itself may lie where the user may not go.
        let process = Command::new("/proc/self/exe")
            .args([TEST, "--exact", "--nocapture", "--test-threads=1"])
            .env(NAME, attack)
            .env(ROOT, volume.root())
            .current_dir("/")
            .uid(user)
            .gid(user)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .expect("this program runs again");
        RunningAttack { process, attacker: Lines::new(ours) }
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Sends a line to the attacker.
    pub fn say(&mut self, line: impl std::fmt::Display) {
        self.attacker.say(line);
    }

    /// What the attacker says next.
    pub fn hear(&mut self) -> String {
        self.attacker.hear()
    }

    /// Waits until the attacker says so.
    pub fn wait_for(&mut self, line: &str) {
        assert_eq!(self.hear(), line);
    }

    /// Waits until the attack is over, and insists that it went as its author meant.
    pub fn end(mut self) {
        let status = self.process.wait().expect("a child");
        assert!(status.success(), "the attacker ended with {status}; what it said is above");
    }

    /// Kills the attacker during its attack.
    pub fn kill(mut self) -> ExitStatus {
        self.process.kill().expect("a child");
        self.process.wait().expect("a child")
    }
}

impl Drop for RunningAttack {
    fn drop(&mut self) {
        let _ = self.process.kill(); // it may have ended
        let _ = self.process.wait();
    }
}

/// Checks that no two attacks of these tables have the same name; in a process that
/// [`RunningAttack::begin`] started, carries out the one that it is to carry out.
///
/// # Panics
/// If two have the same name, none has the name of the one to be carried out, or that fails.
pub fn check_or_carry_out(tables: &[&[(&str, Attack)]]) {
    let attacks: BTreeMap<_, _> = tables.iter().copied().flatten().copied().collect();
    let all = tables.iter().map(|table| table.len()).sum::<usize>();
    assert_eq!(attacks.len(), all, "two attacks have the same name");
    let (Ok(name), Some(root)) = (std::env::var(NAME), std::env::var_os(ROOT)) else { return };
    let attack = attacks.get(name.as_str()).unwrap_or_else(|| panic!("{name} is not the name of an attack"));
    let test = std::io::stdin().as_fd().try_clone_to_owned().expect("a descriptor");
    attack(&mut Attacker { root: root.into(), test: Lines::new(UnixStream::from(test)) });
}

/// One end of the socket between a test and an attacker.
#[derive(Debug)]
struct Lines(BufReader<UnixStream>);

impl Lines {
    fn new(stream: UnixStream) -> Lines {
        stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        Lines(BufReader::new(stream))
    }

    fn say(&mut self, line: impl std::fmt::Display) {
        writeln!(self.0.get_mut(), "{line}").expect("the other end listens");
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        let len = self.0.read_line(&mut line).expect("the other end says something in time");
        assert_ne!(len, 0, "the other end is gone");
        line.trim_end().to_owned()
    }
}

//! Runs tests against the software CUDA driver (`tests/software-cuda`), each in a process of its
//! own: a process loads CUDA once, and keeps what it found.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Set in the process that runs the body of a test.
const CHILD: &str = "GPUNVME_TEST_CHILD";

/// The folder that holds the software driver's `libcuda.so`, for `LD_LIBRARY_PATH`. It is built if
/// need be, in the profile that the test itself was built in.
///
/// # Panics
/// If it cannot be built.
pub fn folder() -> &'static PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        // A test executable lies at TARGET/PROFILE/deps/NAME.
        let executable = std::env::current_exe().expect("the path of this test");
        let profile = executable.ancestors().nth(2).expect("a test in TARGET/PROFILE/deps");
        let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        build
            .args(["build", "--quiet", "--locked", "--package", "gpunvme-software-cuda"])
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        build.arg("--target-dir").arg(profile.parent().expect("a target folder"));
        if profile.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().expect("cargo runs").success(), "the software CUDA driver does not build");
        let folder = profile.join("software-cuda");
        std::fs::create_dir_all(&folder).expect("a folder beside the programs");
        match std::os::unix::fs::symlink("../libsoftware_cuda.so", folder.join("libcuda.so")) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => panic!("{}: {error}", folder.display()),
            _ => folder,
        }
    })
}

/// Runs the body of the calling test in a process that finds the software driver, with `settings`
/// for it, such as `gpus=2` (`SOFTWARE_CUDA`). The body is the closure itself, not the name of a
/// function.
///
/// # Panics
/// If the body does, or takes more than five minutes.
pub fn with_software_cuda<F: FnOnce()>(settings: &str, body: F) {
    with_libcuda(folder(), &[("SOFTWARE_CUDA", settings)], body);
}

/// As [`with_software_cuda`], with whatever `libcuda.so` there is in a folder.
///
/// # Panics
/// As [`with_software_cuda`].
pub fn with_libcuda<F: FnOnce()>(folder: &Path, environment: &[(&str, &str)], body: F) {
    if std::env::var_os(CHILD).is_some() {
        return body();
    }
    // CRATE::MODULE::TEST::{{closure}}; the test is found by what lies between. That one was found
    // is checked below.
    let name = std::any::type_name::<F>();
    let name = name.trim_end_matches("::{{closure}}").split_once("::").map_or(name, |(_, name)| name);
    let output = Command::new("timeout")
        .args(["--kill-after=5", "300"])
        .arg(std::env::current_exe().expect("the path of this test"))
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .env("LD_LIBRARY_PATH", folder)
        .envs(environment.iter().copied())
        .output()
        .expect("`timeout` of coreutils runs");
    // What went wrong comes first: reports of a run show the beginning.
    let said = format!("{}{}", String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success() && said.contains("1 passed"), "{name}, in a process of its own: {}\n{said}", output.status);
}

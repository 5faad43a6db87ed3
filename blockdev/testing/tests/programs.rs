//! The programs that are installed contain no test device, whatever else of the workspace is built
//! along with them.
use std::process::Command;

#[test]
fn only_the_package_of_tests_depends_on_the_test_devices() {
    let tree = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--locked", "--workspace", "--edges", "normal,build"])
        .args(["--invert", env!("CARGO_PKG_NAME"), "--prefix", "none", "--format", "{p}"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    let tree = String::from_utf8(tree.stdout).expect("cargo writes UTF-8");
    let packages: Vec<&str> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(packages, [env!("CARGO_PKG_NAME"), "gpunvme-tests"], "{tree}");
}

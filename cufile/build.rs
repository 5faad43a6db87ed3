//! Gives the library the name by which programs ask for cuFile, and keeps the C ABI of `gpunvme`,
//! which is linked in, to itself.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcufile.so.0");
    println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    // Nothing in it can be unloaded while its threads run.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}

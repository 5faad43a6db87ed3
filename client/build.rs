//! Gives the C library its SONAME. Its number is that of the C ABI: it rises when a function or a
//! structure of `include/gpunvme.h` is changed or taken away (docs/reference/commands.md).

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // For all targets of this package: what is said for its shared library alone, cargo also says
    // to the linker of each shared library with this package in it (rust-lang/cargo issue 9562).
    // Programs have no use for a SONAME, and take no harm.
    println!("cargo::rustc-link-arg=-Wl,-soname,libgpunvme.so.0");
}

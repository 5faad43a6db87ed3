//! Gives the C library its SONAME. Its number is that of the C ABI: it rises when a function or a
//! structure of `include/gpunvme.h` is changed or taken away (docs/reference/commands.md).

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libgpunvme.so.0");
}

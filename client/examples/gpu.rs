//! Reads a file of a gpunvme mount into the memory of the first GPU, and writes it from there to
//! another file:
//!
//!     cargo run --example gpu -- /data/from /data/to

use gpunvme::gpu::{Segment, Transfers};
use gpunvme::{File, Mount};
use gpunvme_cuda::{Cuda, Which};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let [from, to] = std::env::args().skip(1).collect::<Vec<_>>().try_into().map_err(|_| "usage: gpu FROM TO")?;
    let transfers = Transfers::new(&Mount::open(&from)?)?;
    let (from, to) = (File::open(from)?, File::create(to)?);
    // Any memory that CUDA knows will do, such as a tensor of PyTorch. Nothing is registered.
    let len = from.size()?;
    let memory = Cuda::load()?.gpu(Which::Index(0))?.alloc(len as usize)?;
    let whole = [Segment { file_offset: 0, address: memory.address(), len }];
    // SAFETY: the allocation is that long, and nothing else uses it.
    let read = unsafe { transfers.read(&from, &whole) }?;
    println!("{} bytes by way of {:?}", read.bytes(), read.moved);
    // SAFETY: as above.
    unsafe { transfers.write(&to, &whole) }?;
    to.set_size(len)?;
    Ok(())
}

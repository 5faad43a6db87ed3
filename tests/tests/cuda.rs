//! Tests of CUDA as the library uses it, on the software driver, and on machines without CUDA.

use gpunvme_cuda::{Cuda, CudaError, Move, Unavailable, Version, Which, WritesOrdering};
use gpunvme_tests::cuda::{CHECKS, Pinned};
use gpunvme_tests::software_cuda::{with_libcuda, with_software_cuda};
use gpunvme_tests::{scratch_dir, with_descriptors};
use std::process::Command;
use std::thread;
use zerocopy::IntoBytes;

#[test]
fn without_libcuda_there_is_a_reason() {
    // A folder without one; what `ldconfig` finds is there all the same.
    let folder = scratch_dir();
    with_libcuda(folder.path(), &[], || match Cuda::load() {
        Err(reason) => assert!(reason.to_string().contains("NVIDIA driver") || reason == Unavailable::NoGpu, "{reason}"),
        Ok(cuda) => assert!(cuda.gpus().count() > 0),
    });
}

#[test]
fn an_old_driver_is_told_its_age() {
    with_software_cuda("version=11080", || {
        let reason = Cuda::load().err();
        assert_eq!(reason, Some(Unavailable::TooOld { found: Version(11_080), needed: Version(12_000) }));
        assert_eq!(reason.unwrap().to_string(), "the NVIDIA driver offers CUDA 11.8, and 12.0 is needed: update the driver");
    });
}

#[test]
fn a_driver_that_does_not_start_says_why() {
    with_software_cuda("init=802", || {
        let Some(Unavailable::Init(CudaError { call, code, name })) = Cuda::load().err() else { panic!("it started") };
        assert_eq!((call, code, name), ("cuInit", 802, "CUDA_ERROR_SYSTEM_NOT_READY"));
    });
}

#[test]
fn a_driver_without_a_gpu_says_so() {
    with_software_cuda("gpus=0", || assert_eq!(Cuda::load().err(), Some(Unavailable::NoGpu)));
}

/// As without descriptors: what is missing now may be there soon.
#[test]
fn a_driver_that_could_not_be_loaded_is_loaded_later() {
    with_software_cuda("", || {
        assert_eq!(with_descriptors(0, || Cuda::load().err()), Some(Unavailable::NotFound));
        assert_eq!(Cuda::load().err(), None);
    });
}

/// A folder with a libcuda.so of one function.
fn library(source: &str) -> tempfile::TempDir {
    let folder = scratch_dir();
    let file = folder.path().join("library.c");
    std::fs::write(&file, source).unwrap();
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(folder.path().join("libcuda.so")).arg(&file).status();
    assert!(built.expect("a C compiler").success());
    folder
}

#[test]
fn a_library_that_lacks_a_function_is_named() {
    let folder = library("int cuDriverGetVersion(int *version) { *version = 12040; return 0; }");
    with_libcuda(folder.path(), &[], || {
        let reason = Cuda::load().err();
        assert!(matches!(reason, Some(Unavailable::Symbol { .. })), "{reason:?}");
    });
}

#[test]
fn the_stub_of_the_toolkit_is_told_apart() {
    let folder = library("int cuDriverGetVersion(int *version) { return 34; }");
    with_libcuda(folder.path(), &[], || assert_eq!(Cuda::load().err(), Some(Unavailable::Stub)));
}

#[test]
fn gpus_are_found_by_number_and_uuid() {
    with_software_cuda("gpus=2", || {
        let cuda = Cuda::load().unwrap();
        assert_eq!(cuda.driver_version().to_string(), "12.4");
        let gpus: Vec<_> = cuda.gpus().collect();
        assert_eq!(gpus.iter().map(|gpu| gpu.index()).collect::<Vec<_>>(), [0, 1]);
        for gpu in &gpus {
            assert_eq!(cuda.gpu(gpu.index().to_string().parse().unwrap()).unwrap(), *gpu);
            assert_eq!(cuda.gpu(format!("GPU-{}", gpu.uuid()).parse().unwrap()).unwrap(), *gpu);
        }
        assert_ne!(gpus[0].uuid(), gpus[1].uuid());
        assert_eq!(gpus[1].pci_address(), "ffff:ff:01.0");

        let missing = cuda.gpu("GPU-00000000-0000-0000-0000-000000000000".parse().unwrap()).unwrap_err().to_string();
        assert!(
            missing.contains("no GPU GPU-00000000-0000-0000-0000-000000000000") && missing.contains(&gpus[1].to_string()),
            "{missing}"
        );
        assert!(cuda.gpu(Which::Index(2)).is_err());
        for name in ["", "gpu0", "-1", "GPU-", "GPU-0", "0x0"] {
            assert!(name.parse::<Which>().is_err(), "{name:?}");
        }
    });
}

#[test]
fn what_holds_on_a_gpu_holds_on_the_software_driver() {
    with_software_cuda("gpus=2", || {
        for (name, check) in CHECKS {
            println!("{name}");
            Cuda::load().unwrap().gpus().for_each(check);
        }
    });
}

#[test]
fn a_gpu_that_orders_writes_for_itself_does_so_only_where_it_is_alone() {
    with_software_cuda("gpus=1,writes-ordering=100", || {
        let gpu = Cuda::load().unwrap().gpu(Which::Index(0)).unwrap();
        assert!(gpu.orders_writes_for_streams_of(&gpu) && !gpu.needs_flush());
    });
}

#[test]
fn a_gpu_that_orders_writes_for_itself_does_not_where_others_may_read_its_memory() {
    // What comes after in the order of streams may be on the other GPU, and read this one's memory.
    with_software_cuda("gpus=2,writes-ordering=100", || {
        let gpus: Vec<_> = Cuda::load().unwrap().gpus().collect();
        assert!(!gpus[0].orders_writes_for_streams_of(&gpus[0]));
        assert!(!gpus[0].orders_writes_for_streams_of(&gpus[1]));
        assert!(gpus[0].needs_flush());
        gpus[0].flush_remote_writes().unwrap();
    });
}

#[test]
fn where_processor_and_gpu_are_linked_otherwise_no_order_is_taken_for_granted() {
    with_software_cuda("c2c=1,writes-ordering=200", || {
        let gpu = Cuda::load().unwrap().gpu(Which::Index(0)).unwrap();
        assert_eq!(gpu.writes_ordering(), WritesOrdering::None);
        assert!(gpu.needs_flush());
    });
}

#[test]
fn a_gpu_that_orders_writes_for_all_does_for_streams_of_others() {
    with_software_cuda("gpus=2,writes-ordering=200", || {
        let gpus: Vec<_> = Cuda::load().unwrap().gpus().collect();
        assert!(gpus[0].orders_writes_for_streams_of(&gpus[1]) && !gpus[0].needs_flush());
    });
}

#[test]
fn threads_that_load_it_at_once_get_the_same() {
    with_software_cuda("", || {
        let loads: Vec<_> = (0..8).map(|_| thread::spawn(|| std::ptr::from_ref(Cuda::load().unwrap()).addr())).collect();
        let loaded: Vec<_> = loads.into_iter().map(|load| load.join().unwrap()).collect();
        assert!(loaded.iter().all(|cuda| *cuda == loaded[0]));
    });
}

#[test]
fn what_a_call_is_refused_for_is_named() {
    with_software_cuda("copy-fails=2,dma-buf=0,memory=1048576,writes-ordering=0", || {
        let gpu = Cuda::load().unwrap().gpu(Which::Index(0)).unwrap();
        let (stream, mut pinned, memory) = (gpu.stream().unwrap(), Pinned::new(gpu, 4096), gpu.alloc(4096).unwrap());
        pinned.put(&stream, memory.address(), &[7; 4096]);
        // The second copy.
        // SAFETY: both ranges stay until the end.
        let refused = unsafe { stream.copy(memory.address(), pinned.address(), 4096) }.unwrap_err();
        assert_eq!(refused.to_string(), "cuMemcpyAsync failed: CUDA_ERROR_ECC_UNCORRECTABLE (214)");
        assert_eq!(pinned.get(&stream, memory.address(), 4096), [7; 4096]);

        assert_eq!(gpu.alloc(2 << 20).unwrap_err().name, "CUDA_ERROR_OUT_OF_MEMORY");
        assert!(!gpu.dma_buf_supported());
        assert_eq!(gpu.export_dma_buf(memory.address(), 4096).unwrap_err().code, CudaError::NOT_SUPPORTED);
        assert_eq!(gpu.writes_ordering(), WritesOrdering::None);
        gpu.flush_remote_writes().unwrap();
    });
}

/// It is why the library asks before every launch whether the memory is still there.
#[test]
fn a_kernel_that_touches_freed_memory_ends_the_context() {
    with_software_cuda("", || {
        let gpu = Cuda::load().unwrap().gpu(Which::Index(0)).unwrap();
        let (stream, event, scatter) = (gpu.stream().unwrap(), gpu.event().unwrap(), gpu.scatter().unwrap());
        let mut pinned = Pinned::new(gpu, 4096);
        let freed = gpu.alloc(4096).unwrap().address();
        let from = pinned.address() + 2048;
        pinned.bytes()[..24].copy_from_slice(Move { to: freed, from, len: 16 }.as_bytes());
        // SAFETY: what it does wrong is the point; the table stays until the end.
        unsafe { stream.scatter(&scatter, pinned.address(), 1) }.unwrap();
        assert_eq!(stream.synchronize().unwrap_err().name, "CUDA_ERROR_ILLEGAL_ADDRESS");
        assert_eq!(event.done().unwrap_err().name, "CUDA_ERROR_ILLEGAL_ADDRESS");
        assert_eq!(gpu.alloc(4096).unwrap_err().name, "CUDA_ERROR_ILLEGAL_ADDRESS");
    });
}

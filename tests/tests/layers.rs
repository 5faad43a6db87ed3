//! The layer loader, on a real mount and the software CUDA driver: what each layer's work finds in
//! memory. `cuda-checks --kernels` has a transformer compute with it on a GPU.

use std::fs;
use std::ops::Range;
use std::time::Duration;

use cudarc::driver::sys;
use gpunvme::gpu::{Caching, LayerLoader, LayerSettings, Observer, Segment, Settings, Tier, Transfers};
use gpunvme::{Error, File, Mount, Transfer};
use gpunvme_cuda::{Cuda, Gpu, Stream, Which};
use gpunvme_tests::cuda::{Pinned, own_stream};
use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::software_cuda::with_software_cuda;
use gpunvme_tests::{needs_mount, tree};
use rustix::io::Errno;
use rustix::process::Signal;

const LEN: usize = 6 << 20;

struct Site {
    volume: Mounted,
    bytes: Vec<u8>,
    gpu: Gpu,
    name: usize,
    stream: Stream,
}

impl Site {
    fn new() -> Site {
        let cuda = Cuda::load().unwrap();
        let (volume, gpu) = (Mounted::new(), cuda.gpu(Which::Index(0)).unwrap());
        let bytes = tree::pattern(21, LEN);
        fs::write(volume.path("model"), &bytes).unwrap();
        let name = own_stream(gpu);
        // SAFETY: it is never destroyed.
        let stream = unsafe { cuda.application_stream(name) }.unwrap();
        Site { volume, bytes, gpu, name, stream }
    }

    fn loader(&self, layers: &[Vec<Range<u64>>], settings: LayerSettings) -> LayerLoader {
        self.try_loader(layers, settings).unwrap()
    }

    fn try_loader(&self, layers: &[Vec<Range<u64>>], settings: LayerSettings) -> Result<LayerLoader, Error> {
        let file = File::open(self.volume.path("model")).unwrap();
        LayerLoader::new(&self.transfers(), file, 0, layers, settings)
    }

    fn transfers(&self) -> Transfers {
        let mount = Mount::open(self.volume.root()).unwrap();
        // What was just written the page cache has: it is to come from the device.
        let mut usual = Settings::default();
        usual.caching = Caching::Never;
        Transfers::with(&mount, usual).unwrap()
    }

    /// Goes through the model so many times, and has the stream copy each layer's tensors away as
    /// its work; then compares them.
    fn pass(&self, loader: &mut LayerLoader, layers: &[Vec<Range<u64>>], passes: usize) {
        let mut copies = Pinned::new(self.gpu, (passes * LEN).next_multiple_of(4096));
        let (mut at, mut expected) = (0, Vec::new());
        for (number, layer) in layers.iter().enumerate().cycle().take(passes * layers.len()) {
            // SAFETY: the stream is never destroyed.
            let found = unsafe { loader.next(self.name) }.unwrap();
            assert_eq!((found.number, found.tensors.len()), (number, layer.len()));
            for (address, range) in found.tensors.iter().zip(layer) {
                let len = (range.end - range.start) as usize;
                // SAFETY: both are as long, and nothing else writes there until it is waited for.
                unsafe { self.stream.copy(copies.address() + at as u64, *address, len) }.unwrap();
                expected.extend_from_slice(&self.bytes[range.start as usize..range.end as usize]);
                at += len;
            }
        }
        // SAFETY: as above.
        unsafe { loader.finish(self.name) }.unwrap();
        assert!(copies.bytes()[..at] == expected, "layers had other bytes");
    }
}

/// Layers of tensors of any length, in any order in the file, some of them twice.
fn layers() -> Vec<Vec<Range<u64>>> {
    let layer = |n: u64| {
        let at = (n * 7 % 10) * 500_001;
        vec![at..at + 300_000, at + 300_000..at + 300_004 + n, 5..4096 + n * 13]
    };
    (0..10).map(layer).collect()
}

#[test]
fn each_layer_s_work_finds_its_tensors_in_any_tier() {
    needs_mount!();
    with_software_cuda("", || {
        let (site, layers) = (Site::new(), layers());
        let about = 310_000;
        for (resident, pinned, buffers) in [(0, 0, 2), (3, 0, 2), (2, 3, 3), (0, 12, 2), (12, 0, 2), (0, 0, 50)] {
            let settings = LayerSettings { resident: resident * about, pinned: pinned * about, buffers };
            let mut loader = site.loader(&layers, settings);
            site.pass(&mut loader, &layers, 1);
            site.pass(&mut loader, &layers, 2);
            assert!(loader.gpu_bytes() <= settings.resident + buffers.min(10) as u64 * 350_000, "{} bytes", loader.gpu_bytes());
        }
        let mut one = site.loader(&layers[..1], LayerSettings::default());
        site.pass(&mut one, &layers[..1], 5);
    });
}

/// Names of a header that may have come from anywhere.
#[test]
fn layers_are_found_by_the_names_in_a_header_which_may_be_any_bytes() {
    needs_mount!();
    with_software_cuda("", || {
        let site = Site::new();
        let model = |header: &str, len: u64| {
            let mut bytes = len.to_le_bytes().to_vec();
            bytes.extend_from_slice(header.as_bytes());
            bytes.extend_from_slice(&site.bytes[..100_000]);
            fs::write(site.volume.path("named"), &bytes).unwrap();
            (File::open(site.volume.path("named")).unwrap(), bytes)
        };
        let header = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[10,100],"data_offsets":[40000,44000]},"a":{"dtype":"U8","shape":[40000],"data_offsets":[0,40000]}}"#;
        let (file, bytes) = model(header, header.len() as u64);
        let found = file.safetensors().unwrap();
        assert_eq!(found.iter().map(|tensor| tensor.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!((found[1].dtype.as_str(), found[1].shape.as_slice()), ("F32", &[10, 100][..]));
        let data = 8 + header.len() as u64;
        assert_eq!(found[1].range, data + 40_000..data + 44_000);
        let transfers = Transfers::new(&Mount::open(site.volume.root()).unwrap()).unwrap();
        let layers = [vec!["b", "a"], vec!["a"]];
        let mut loader = LayerLoader::by_names(&transfers, file, 0, &layers, LayerSettings::default()).unwrap();
        let ranges: Vec<Vec<_>> = vec![vec![found[1].range.clone(), found[0].range.clone()], vec![found[0].range.clone()]];
        let site = Site { bytes, ..site };
        site.pass(&mut loader, &ranges, 3);
        drop((loader, transfers));
    });
}

#[test]
fn headers_that_are_none_are_refused() {
    needs_mount!();
    let volume = Mounted::new();
    let refused = |bytes: &[u8]| {
        fs::write(volume.path("named"), bytes).unwrap();
        let error = File::open(volume.path("named")).unwrap().safetensors().unwrap_err().to_string();
        assert!(error.contains("must be a file of safetensors"), "{error}");
    };
    let with_header = |header: &str| [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 100]].concat();
    refused(b"short");
    refused(&[0xFF; 64]);
    refused(&with_header("[]"));
    refused(&with_header("{"));
    refused(&with_header(&"[".repeat(100_000)));
    for entry in [
        r#"{}"#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[0,101]}"#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[5,4]}"#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[18446744073709551615,18446744073709551615]}"#,
        r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#,
        r#"{"dtype":7,"shape":[1],"data_offsets":[0,4]}"#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}"#,
        // Of another length than type and shape have.
        r#"{"dtype":"F32","shape":[1],"data_offsets":[0,3]}"#,
        r#"{"dtype":"F32","shape":[1],"data_offsets":[0,8]}"#,
        r#"{"dtype":"F32","shape":[],"data_offsets":[0,0]}"#,
        r#"{"dtype":"U8","shape":[3,0],"data_offsets":[0,1]}"#,
        r#"{"dtype":"F4","shape":[3],"data_offsets":[0,2]}"#,
        r#"{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}"#,
        r#"{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}"#,
        r#"{"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}"#,
        r#"{"dtype":"F99","shape":[1],"data_offsets":[0,4]}"#,
        r#"{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}"#,
        // Not where the data begin.
        r#"{"dtype":"U8","shape":[4],"data_offsets":[1,5]}"#,
    ] {
        refused(&with_header(&format!(r#"{{"a":{entry}}}"#)));
    }
    for (first, second) in [([0, 4], [2, 6]), ([0, 4], [0, 4]), ([0, 4], [5, 9])] {
        let entry = |[begin, end]: [u64; 2]| format!(r#"{{"dtype":"U8","shape":[4],"data_offsets":[{begin},{end}]}}"#);
        refused(&with_header(&format!(r#"{{"a":{},"b":{}}}"#, entry(first), entry(second))));
    }
    let one = |begin: u64| format!(r#""a":{{"dtype":"U8","shape":[1],"data_offsets":[{begin},{}]}}"#, begin + 1);
    refused(&with_header(&format!("{{{},{}}}", one(0), one(1)))); // two of one name
}

#[test]
fn headers_of_all_types_are_read() {
    needs_mount!();
    let volume = Mounted::new();
    let types = [
        (4, "F4"),
        (6, "F6_E2M3 F6_E3M2"),
        (8, "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ"),
        (16, "I16 U16 F16 BF16"),
        (32, "I32 U32 F32"),
        (64, "C64 F64 I64 U64"),
    ];
    let (mut at, mut entries) = (0, Vec::new());
    for (bits, dtype) in types.iter().flat_map(|(bits, names)| names.split(' ').map(|name| (*bits, name))) {
        let end = at + 2 * 4 * bits / 8;
        entries.push(format!(r#""{dtype}":{{"data_offsets":[{at},{end}],"shape":[2,1,4],"more":[{{}}],"dtype":"{dtype}"}}"#));
        at = end;
    }
    entries.insert(0, format!(r#""empty":{{"dtype":"F32","shape":[5,0],"data_offsets":[{at},{at}]}}"#));
    entries.push(r#""__metadata__":{"format":"pt"}"#.into());
    let header = format!("{{{}}}   ", entries.join(","));
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; at as usize]].concat();
    fs::write(volume.path("named"), bytes).unwrap();
    let tensors = File::open(volume.path("named")).unwrap().safetensors().unwrap();
    assert_eq!(tensors.len(), 23);
    assert!(tensors[..22].iter().all(|tensor| tensor.name == tensor.dtype && tensor.shape == [2, 1, 4]));
    assert_eq!(tensors[22].name, "empty");
}

#[test]
fn a_loader_that_is_dropped_in_the_middle_of_a_model_ends() {
    needs_mount!();
    with_software_cuda("", || {
        let (site, layers) = (Site::new(), layers());
        for count in 0..4 {
            let mut loader = site.loader(&layers, LayerSettings { pinned: 700_000, ..LayerSettings::default() });
            for _ in 0..count {
                // SAFETY: the stream is never destroyed.
                unsafe { loader.next(site.name) }.unwrap();
            }
            drop(loader);
        }
        // What it had attached keeps no volume from being unmounted.
        let Site { volume, .. } = site;
        volume.unmount();
    });
}

#[test]
fn layers_that_cannot_be_read_are_an_error_and_no_wait_for_ever() {
    needs_mount!();
    with_software_cuda("", || {
        let (site, layers) = (Site::new(), layers());
        let mut loader = site.loader(&layers, LayerSettings::default());
        site.pass(&mut loader, &layers, 1);
        let Site { volume, name, .. } = site;
        drop(volume.signal(Signal::KILL));
        let failed = (0..layers.len() * 2).find_map(|_| {
            // SAFETY: the stream is never destroyed.
            let next = unsafe { loader.next(name).map(|layer| assert_ne!(layer.tier, Tier::Pinned)) };
            // SAFETY: as above.
            next.and_then(|()| unsafe { loader.finish(name) }).err()
        });
        let error = failed.expect("the daemon is dead");
        assert!(error.to_string().contains("model"), "{error}");
        // SAFETY: as above.
        let again = unsafe { loader.next(name) };
        assert!(again.is_err(), "after an error there are no more layers");
    });
}

/// The use of the layer before has no end then, and its memory is not to be filled anew.
#[test]
fn after_cuda_has_refused_the_end_of_a_use_there_are_no_more_layers() {
    needs_mount!();
    with_software_cuda("gpus=2", || {
        let (site, layers) = (Site::new(), layers());
        // CUDA takes no event of one GPU into a stream of another.
        let elsewhere = own_stream(Cuda::load().unwrap().gpu(Which::Index(1)).unwrap());
        for (resident, buffers) in [(0, 2), (930_000, 3)] {
            let mut loader = site.loader(&layers, LayerSettings { resident, buffers, ..LayerSettings::default() });
            // SAFETY: the streams are never destroyed.
            let mut next = |stream| unsafe { loader.next(stream) };
            while next(site.name).unwrap().tier == Tier::Resident {}
            assert!(matches!(next(elsewhere).unwrap_err(), Error::Cuda { .. }));
            for _ in 0..2 * layers.len() {
                next(site.name).expect_err("after an error there are no more layers");
            }
        }
    });
}

/// Does something while the stream is captured into a graph, which is thrown away.
fn while_captured<T>(site: &Site, does: impl FnOnce() -> T) -> T {
    let (stream, mut graph) = (site.name as sys::CUstream, std::ptr::null_mut());
    let _entered = site.gpu.enter().unwrap();
    // SAFETY: the stream is never destroyed, and the graph is ours.
    unsafe {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_GLOBAL;
        sys::cuStreamBeginCapture_v2(stream, mode).result().unwrap();
        let done = does();
        sys::cuStreamEndCapture(stream, &mut graph).result().unwrap();
        sys::cuGraphDestroy(graph).result().unwrap();
        done
    }
}

#[test]
fn a_stream_that_is_captured_is_refused_and_the_loader_goes_on_afterwards() {
    needs_mount!();
    with_software_cuda("", || {
        let (site, layers) = (Site::new(), layers());
        let mut loader = site.loader(&layers, LayerSettings::default());
        for layer in 0..2 * layers.len() {
            // SAFETY: the stream is never destroyed.
            assert_eq!(unsafe { loader.next(site.name) }.unwrap().number, layer % layers.len());
            let refused = while_captured(&site, || {
                // SAFETY: as above.
                unsafe { [loader.next(site.name).unwrap_err(), loader.finish(site.name).unwrap_err()] }
            });
            assert!(refused.iter().all(|error| matches!(error, Error::StreamCaptured { .. })), "{refused:?}");
        }
        // SAFETY: as above.
        unsafe { loader.finish(site.name) }.unwrap();
        site.pass(&mut loader, &layers, 1);
    });
}

fn is_short(error: &Error, layer: usize) {
    let said = error.to_string();
    assert!(error.errno() == Errno::IO && said.contains("model"), "{said}");
    assert!(said.contains(&format!("the file ends before layer {layer} does")), "{said}");
}

#[test]
fn layers_that_reach_past_the_end_of_the_file_are_refused_in_any_tier() {
    needs_mount!();
    with_software_cuda("", || {
        let site = Site::new();
        let len = LEN as u64;
        let layers: Vec<Vec<Range<u64>>> = vec![vec![0..4096], vec![0..5, len - 4096..len + 1]];
        for (resident, pinned) in [(0, 0), (u64::MAX, 0), (0, u64::MAX)] {
            let settings = LayerSettings { resident, pinned, buffers: 2 };
            is_short(&site.try_loader(&layers, settings).unwrap_err(), 1);
        }
    });
}

/// What is handed out after that would be the bytes of the layer that had the buffer before.
#[test]
fn a_file_that_becomes_shorter_under_a_loader_fails_the_layers_that_it_has_no_more() {
    needs_mount!();
    with_software_cuda("", || {
        let site = Site::new();
        #[allow(clippy::single_range_in_vec_init)] // a layer of one tensor
        let layers: Vec<Vec<Range<u64>>> = (0..6).map(|n| vec![n << 20..(n + 1) << 20]).collect();
        for (resident, pinned) in [(0, 0), (2 << 20, 0), (0, 2 << 20)] {
            let mut loader = site.loader(&layers, LayerSettings { resident, pinned, buffers: 2 });
            site.pass(&mut loader, &layers, 1);
            let model = fs::OpenOptions::new().write(true).open(site.volume.path("model")).unwrap();
            model.set_len((3 << 20) + 5).unwrap();
            let failed = (0..layers.len() * 2).find_map(|_| {
                // SAFETY: the stream is never destroyed.
                unsafe { loader.next(site.name) }.err()
            });
            // SAFETY: as above.
            let error = failed.or_else(|| unsafe { loader.finish(site.name) }.err()).expect("the file became shorter");
            assert!(error.to_string().contains("the file ends before layer "), "{error}");
            drop(loader);
            fs::write(site.volume.path("model"), &site.bytes).unwrap();
        }
    });
}

/// Keeps the thread that serves streams from its work.
struct Slow;

impl Observer for Slow {
    fn begins(&mut self) -> Result<i64, Errno> {
        std::thread::sleep(Duration::from_millis(2));
        Ok(0)
    }

    fn ends(&mut self, _: &Result<Transfer, Error>) {
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The stream passes a read before the library's thread has its outcome; that is kept busy here.
#[test]
fn a_model_is_not_finished_before_the_outcome_of_all_that_was_handed_out_is_known() {
    needs_mount!();
    with_software_cuda("", || {
        let site = Site::new();
        let layers: Vec<Vec<Range<u64>>> = vec![vec![0..100_000]];
        fs::write(site.volume.path("other"), &site.bytes[..4096]).unwrap();
        let (transfers, other) = (site.transfers(), File::open(site.volume.path("other")).unwrap());
        let (memory, stream) = (Pinned::new(site.gpu, 4096), own_stream(site.gpu));
        let segments = [Segment { file_offset: 0, address: memory.address(), len: 4096 }];
        for _ in 0..40 {
            fs::write(site.volume.path("model"), &site.bytes[..100_000]).unwrap();
            let model = File::open(site.volume.path("model")).unwrap();
            let mut loader = LayerLoader::new(&transfers, model, 0, &layers, LayerSettings::default()).unwrap();
            // SAFETY: the stream is never destroyed.
            let mut next = || unsafe { loader.next(site.name) }.map(drop);
            next().unwrap();
            let model = fs::OpenOptions::new().write(true).open(site.volume.path("model")).unwrap();
            model.set_len(50_000).unwrap();
            // SAFETY: nothing else uses the memory, and the stream is never destroyed.
            let slow = (0..10).map(|_| unsafe { transfers.read_on_stream_with(&other, &segments, stream, Slow) }.unwrap());
            let slow: Vec<_> = slow.collect();
            // Its buffer is filled when the first was used: with what the file has now.
            let handed_out = next().and_then(|()| next());
            // SAFETY: as above.
            let error = handed_out.and_then(|()| unsafe { loader.finish(site.name) }).expect_err("the file became shorter");
            is_short(&error, 0);
            for read in slow {
                read.wait().unwrap();
            }
        }
    });
}

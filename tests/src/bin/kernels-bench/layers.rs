//! A transformer whose weights exceed the memory that it is given: loading and computing together,
//! beside each alone.

use crate::row::{head, ms, row};
use gpunvme::gpu::LayerSettings;
use gpunvme_cuda::Gpu;
use gpunvme_tests::cuda::{Model, ModelSite, Shape, own_stream};
use gpunvme_tests::mounted::Image;
use std::time::Duration;

pub fn measure(gpu: Gpu, quick: bool, kernels: bool) {
    let shape = if quick {
        Shape { layers: 6, tokens: 32, width: 64, heads: 4, inner: 128 }
    } else {
        Shape { layers: 24, tokens: 1024, width: 1024, heads: 16, inner: 4096 }
    };
    let weights = shape.layer() * shape.layers as u64;
    let site = ModelSite::new(Image::formatted_with(weights + (512 << 20)).mount(), shape);
    head(
        &format!(
            "A transformer of {} layers of {:.1} MB, {} tokens; ms, best of {}",
            shape.layers,
            shape.layer() as f64 / 1e6,
            shape.tokens,
            rounds(quick)
        ),
        &["layers in memory", "pinned", "buffers", "GPU memory, MB", "compute alone", "loading alone", "both", "of the longer"],
    );
    let computing = kernels.then(|| {
        let model = Model::new(gpu, shape);
        let all = site.weights(gpu);
        let (output, _) = model.resident(&all);
        let alone = (0..rounds(quick)).map(|_| model.resident(&all).1).min().unwrap();
        (model, output, alone)
    });
    let stream = computing.as_ref().map_or_else(|| own_stream(gpu), |(model, ..)| model.stream());
    for (resident, pinned, buffers) in
        [(0, 0, 2), (0, 0, 3), (shape.layers / 4, 0, 2), (shape.layers / 4, shape.layers / 4, 2), (0, shape.layers, 2)]
    {
        let room = |layers: usize| layers as u64 * (shape.layer() + 4096);
        let settings = LayerSettings { resident: room(resident), pinned: room(pinned), buffers };
        let mut loader = site.loader(gpu, settings);
        let memory = format!("{:.0} of {:.0}", loader.gpu_bytes() as f64 / 1e6, weights as f64 / 1e6);
        let loading = (0..rounds(quick)).map(|_| site.load_alone(&mut loader, stream).0).min().unwrap();
        let mut values = vec![pinned.to_string(), buffers.to_string(), memory];
        if let Some((model, output, alone)) = &computing {
            let mut both = Duration::MAX;
            for _ in 0..rounds(quick) {
                let (found, took) = model.loaded(&mut loader);
                assert!(found == *output, "other values than with all weights in memory");
                both = both.min(took);
            }
            let longer = loading.max(*alone);
            values.extend([ms(*alone), ms(loading), ms(both), format!("{:.2}", both.as_secs_f64() / longer.as_secs_f64())]);
        } else {
            values.extend(["-".into(), ms(loading), "-".into(), "-".into()]);
        }
        row(&resident.to_string(), &values);
    }
}

fn rounds(quick: bool) -> usize {
    if quick { 1 } else { 5 }
}

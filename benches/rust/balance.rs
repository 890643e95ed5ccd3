//! Balance: ten thousand layers into 256 parts, for costs of several kinds, in 10 ms.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use torchrelay_core::balance;

/// Numbers in 0..1, always the same.
fn uniform() -> impl Iterator<Item = f64> {
    let mut state = 1u64;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f64::from(u32::try_from(state >> 32).unwrap_or_default()) / 4_294_967_296.0
    })
}

fn kinds(layers: usize) -> Vec<(&'static str, Vec<f64>)> {
    let costs = |cost: fn(f64) -> f64| uniform().map(cost).take(layers).collect::<Vec<_>>();
    let mut dominated = costs(|x| x);
    if let Some(cost) = dominated.get_mut(layers / 3) {
        *cost = 1000.0;
    }
    vec![
        ("equal", costs(|_| 1.0)),
        ("uniform", costs(|x| x)),
        ("integers", costs(|x| (x * 4.0).floor())),
        ("heavy_tail", costs(|x| (1.0 / (1.0 - x)).powi(2))),
        ("every_magnitude", costs(|x| (x * 1400.0 - 700.0).exp())),
        ("one_dominates", dominated),
        ("zeros", costs(|x| if x < 0.01 { 1.0 } else { 0.0 })),
    ]
}

fn divisions(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("balance");
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1)).sample_size(10);
    for (layers, parts) in [(100, 8), (1_000, 32), (10_000, 256)] {
        for (kind, costs) in kinds(layers) {
            let id = BenchmarkId::new(kind, format!("{layers}_into_{parts}"));
            group.bench_function(id, |bencher| bencher.iter(|| balance(black_box(&costs), parts)));
        }
    }
    group.finish();
}

criterion_group!(benches, divisions);
criterion_main!(benches);

//! Clock cycles, makers, verification, lowering, simulation and search: the time per action must not grow with the plan.

use std::hint::black_box;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use torchrelay_core::{
    Costs, Gpipe, Lowering, Maker, PerStage, Schedule, Search, clock_cycles, make_gpipe, search,
};

/// Partitions and micro-batches.
const SIZES: [(usize, usize); 4] = [(4, 8), (32, 128), (128, 1024), (512, 4096)];

/// A benchmark for every size; what is done is counted in `per_pair` elements for a pair of partition and micro-batch.
fn for_each_size(
    criterion: &mut Criterion,
    name: &str,
    per_pair: usize,
    run: impl Fn(&mut BenchmarkGroup<'_, WallTime>, BenchmarkId, usize, usize),
) {
    let mut group = criterion.benchmark_group(name);
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2)).sample_size(10);
    for (n, m) in SIZES {
        group.throughput(Throughput::Elements((n * m * per_pair) as u64));
        run(&mut group, BenchmarkId::from_parameter(format!("{n}x{m}")), n, m);
    }
    group.finish();
}

fn gpipe(n: usize, m: usize) -> Schedule {
    make_gpipe(n, m, Gpipe::default()).unwrap_or_else(|error| unreachable!("{error}"))
}

fn all(criterion: &mut Criterion) {
    for_each_size(criterion, "clock_cycles", 1, |group, id, n, m| {
        group.bench_function(id, |bencher| bencher.iter(|| clock_cycles(black_box(m), n)));
    });
    for_each_size(criterion, "make_gpipe", 2, |group, id, n, m| {
        group.bench_function(id, |bencher| bencher.iter(|| gpipe(black_box(n), m)));
    });
    for maker in [Maker::InterleavedZb, Maker::ZbV] {
        for_each_size(criterion, &format!("make_{maker}"), 6, |group, id, n, m| {
            group.bench_function(id, |bencher| bencher.iter(|| maker.make(black_box(n), m, None)));
        });
    }
    for_each_size(criterion, "verify", 2, |group, id, n, m| {
        let schedule = gpipe(n, m);
        group.bench_function(id, |bencher| bencher.iter(|| black_box(&schedule).verify()));
    });
    // All that lowering makes of a forward and a backward: each received, sent and waited for.
    for_each_size(criterion, "lower", 8, |group, id, n, m| {
        let schedule = gpipe(n, m);
        group.bench_function(id, |bencher| bencher.iter(|| black_box(&schedule).lower(Lowering::default())));
    });
    for_each_size(criterion, "verify_lowered", 8, |group, id, n, m| {
        let lowered = gpipe(n, m).lower(Lowering::default()).unwrap_or_else(|error| unreachable!("{error}"));
        group.bench_function(id, |bencher| bencher.iter(|| black_box(&lowered).verify()));
    });
    for_each_size(criterion, "simulate", 2, |group, id, n, m| {
        let schedule = gpipe(n, m);
        group.bench_function(id, |bencher| bencher.iter(|| black_box(&schedule).simulate(&Costs::default())));
    });
    search_for(criterion);
}

/// The sizes that a search has to be quick for.
fn search_for(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("search");
    group.measurement_time(Duration::from_secs(2)).sample_size(10);
    for (p, m, limit) in [(8, 32, 16.0), (32, 256, 64.0)] {
        let (placement, limit): (Vec<_>, PerStage) = ((0..p).collect(), limit.into());
        group.bench_function(format!("{p}x{m}"), |bencher| {
            bencher.iter(|| {
                let options = Search::default();
                search(black_box(&placement), m, &Costs::default(), Some(&limit), options, &mut |_| true)
            });
        });
    }
    group.finish();
    let mut group = criterion.benchmark_group("v_half");
    group.bench_function("32x64", |bencher| bencher.iter(|| Maker::VHalf.make(black_box(32), 64, None)));
    group.finish();
}

criterion_group!(benches, all);
criterion_main!(benches);

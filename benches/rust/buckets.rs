//! Bucket assignment: the time per tensor must not grow with their number, nor with that of keys.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use torchrelay_core::assign_buckets;

fn assignment(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("assign_buckets");
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1)).sample_size(20);
    let limits = [1 << 20, 25 << 20];
    for tensors in [1_000, 10_000, 100_000, 1_000_000] {
        for keys in [1, 2, 8] {
            // Sizes as in models: many small ones between few large ones.
            let sizes: Vec<i64> =
                (0i64..).take(tensors).map(|i| if i % 2 == 0 { 4 << (i * 7 % 22) } else { 4096 }).collect();
            let keys_of: Vec<i64> = (0i64..).take(tensors).map(|i| i * 5 % keys).collect();
            group.throughput(Throughput::Elements(tensors as u64));
            let id = BenchmarkId::new(format!("{keys}_keys"), tensors);
            group.bench_function(id, |bencher| {
                bencher.iter(|| assign_buckets(black_box(&sizes), &keys_of, &limits, None, None));
            });
        }
    }
    group.finish();
}

fn permuted(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("assign_buckets_by_arrival");
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1)).sample_size(20);
    let count = 100_000i64;
    let sizes: Vec<i64> = (0..count).map(|i| 4 << (i * 7 % 22)).collect();
    let (keys, sparse) = (vec![0u8; sizes.len()], vec![false; sizes.len()]);
    let indices: Vec<i64> = (0..count).rev().collect();
    group.throughput(Throughput::Elements(sizes.len() as u64));
    group.bench_function("100000", |bencher| {
        bencher.iter(|| assign_buckets(black_box(&sizes), &keys, &[25 << 20], Some(&sparse), Some(&indices)));
    });
    group.finish();
}

criterion_group!(benches, assignment, permuted);
criterion_main!(benches);

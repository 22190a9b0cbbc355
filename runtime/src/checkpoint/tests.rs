//! Round trips between plans, damage of every byte, and failures in the middle of a save.

use super::*;
use crate::comm::{Group, Layout, Patience, Peer, local};
use std::collections::BTreeMap;

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("dcc-checkpoint-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Two tensors and a scalar; byte i of tensor t is a function of both.
fn tensors() -> Vec<(Key, DType, Vec<u64>)> {
    let key = |name: &str, state: Option<&str>| Key { name: name.into(), state: state.map(Into::into) };
    vec![
        (key("w1", None), DType::F32, vec![7, 6]),
        (key("w1", Some("m")), DType::F32, vec![7, 6]),
        (key("count", None), DType::I64, vec![]),
    ]
}

fn whole(tensor: usize) -> Vec<u8> {
    let (_, dtype, shape) = &tensors()[tensor];
    let bytes = shape.iter().product::<u64>() * dtype.bytes();
    (0..bytes).map(|i| (i * 7 + tensor as u64 * 31) as u8).collect()
}

/// What `rank` of `world` holds when dim `dim` is split: uneven blocks in padded buffers.
fn slice_of(tensor: usize, dim: usize, rank: u64, world: u64) -> Slice {
    let shape = &tensors()[tensor].2;
    let mut slice = Slice::whole(shape);
    if let Some(&size) = shape.get(dim) {
        let block = size.div_ceil(world);
        slice.start[dim] = (rank * block).min(size);
        slice.extent[dim] = ((rank + 1) * block).min(size) - slice.start[dim];
        slice.local[dim] = block;
    }
    slice
}

fn cut(tensor: usize, slice: &Slice) -> Vec<u8> {
    let element = tensors()[tensor].1.bytes();
    let whole = whole(tensor);
    let mut out = vec![0xEE; (slice.local_elements() * element) as usize];
    slice.for_each_run(|run| {
        let (from, to, len) = ((run.global * element) as usize, (run.local * element) as usize, (run.len * element) as usize);
        out[to..to + len].copy_from_slice(&whole[from..from + len]);
    });
    out
}

/// Saves from `world` threads, tensors split along `dim`; what each rank got.
fn saved(options: &Options, step: u64, world: u32, dim: usize) -> Vec<Result<PathBuf>> {
    let layout = Layout::new(vec![Group((0..world).collect())], vec![4096; world as usize]);
    let peers = local::world(&layout, Patience::default()).unwrap();
    let position = Position { steps: step, samples: 64 * step };
    let state = RunState { step, seed: 7, position, data: 1, description: "mlp".into(), ..RunState::default() };
    let one = |mut peer: Peer| {
        let rank = u64::from(peer.rank());
        let slices: Vec<Slice> = (0..3).map(|tensor| slice_of(tensor, dim, rank, u64::from(world))).collect();
        let buffers: Vec<Vec<u8>> = (0..3).map(|tensor| cut(tensor, &slices[tensor])).collect();
        let reads: Vec<Box<ReadLocal>> = buffers
            .iter()
            .map(|buffer| -> Box<ReadLocal> {
                Box::new(|at, out| {
                    out.copy_from_slice(&buffer[at as usize..at as usize + out.len()]);
                    Ok(())
                })
            })
            .collect();
        // A scalar has no dim to split: rank 0 writes it.
        let mine = (0..3).filter(|&tensor| rank == 0 || tensors()[tensor].2.len() > dim);
        let shards: Vec<Shard> = mine
            .map(|tensor| {
                let (key, dtype, _) = tensors().swap_remove(tensor);
                Shard { key, dtype, slice: slices[tensor].clone(), read: &reads[tensor] }
            })
            .collect();
        let result = save(&mut peer, options, &state, &shards);
        peer.finish();
        result
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = peers.into_iter().map(|peer| scope.spawn(|| one(peer))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn loaded(checkpoint: &mut Checkpoint, tensor: usize, slice: &Slice) -> Result<Vec<u8>> {
    let (key, dtype, _) = tensors().swap_remove(tensor);
    let mut out = vec![0xEE; (slice.local_elements() * dtype.bytes()) as usize];
    checkpoint.read(&key, dtype, slice, &mut |at, bytes| {
        out[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        Ok(())
    })?;
    Ok(out)
}

fn options(folder: &Folder) -> Options {
    Options { dir: folder.0.clone(), keep_last: None }
}

#[test]
fn any_plan_loads_what_any_plan_saved() {
    let folder = Folder::new("plans");
    let plans = [(1, 0), (2, 0), (2, 1), (3, 0), (4, 1)];
    for (step, (world, dim)) in plans.into_iter().enumerate() {
        let path = saved(&options(&folder), step as u64, world, dim).swap_remove(0).unwrap();
        let mut checkpoint = Checkpoint::open(&path).unwrap();
        checkpoint.verify().unwrap();
        assert_eq!((checkpoint.run().step, checkpoint.run().position.samples), (step as u64, 64 * step as u64));
        for (other_world, other_dim) in plans {
            for (rank, tensor) in (0..other_world).flat_map(|rank| (0..3).map(move |tensor| (rank, tensor))) {
                let slice = slice_of(tensor, other_dim, u64::from(rank), u64::from(other_world));
                assert_eq!(loaded(&mut checkpoint, tensor, &slice).unwrap(), cut(tensor, &slice));
            }
        }
    }
    assert_eq!(Resume::Auto.find(Some(&folder.0)).unwrap().unwrap(), folder.0.join("step-00000004"));
    assert_eq!(Resume::None.find(Some(&folder.0)).unwrap(), None);
    assert_eq!(Resume::Path(folder.0.join("step-00000001")).find(None).unwrap().unwrap(), folder.0.join("step-00000001"));
    assert!(Resume::Path("nowhere".into()).find(None).is_err());
    let hidden =
        std::fs::read_dir(&folder.0).unwrap().filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().starts_with('.'));
    assert_eq!(hidden.count(), 0, "nothing is left over");
}

#[test]
fn shard_files_are_plain_safetensors() {
    let folder = Folder::new("plain");
    let path = saved(&options(&folder), 3, 2, 0).swap_remove(0).unwrap();
    let bytes = std::fs::read(path.join("rank-00000.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut names = tensors.names();
    names.sort();
    assert_eq!(names, ["count", "w1:m[0:4, 0:6]", "w1[0:4, 0:6]"]);
    assert_eq!(tensors.tensor("w1[0:4, 0:6]").unwrap().data(), &whole(0)[..4 * 6 * 4]);
}

/// Opens and reads everything.
fn read_all(path: &Path) -> Result<BTreeMap<usize, Vec<u8>>> {
    let mut checkpoint = Checkpoint::open(path)?;
    checkpoint.verify()?;
    (0..3).map(|tensor| Ok((tensor, loaded(&mut checkpoint, tensor, &Slice::whole(&tensors()[tensor].2))?))).collect()
}

#[test]
fn every_damaged_byte_is_found_and_its_tensor_named() {
    let folder = Folder::new("damage");
    let path = saved(&options(&folder), 9, 2, 0).swap_remove(0).unwrap();
    let original = read_all(&path).unwrap();
    let files: Vec<PathBuf> = std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 4);
    for file in &files {
        let good = std::fs::read(file).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            std::fs::write(file, &bad).unwrap();
            let error = read_all(&path).expect_err("a changed byte is found");
            assert_eq!(error.exit(), 5, "{file:?} byte {at}: {error}");
        }
        for length in (0..good.len()).step_by(1 + good.len() / 40) {
            std::fs::write(file, &good[..length]).unwrap();
            assert_eq!(read_all(&path).expect_err("a cut is found").exit(), 5);
        }
        std::fs::write(file, [&good[..], b"\n"].concat()).unwrap();
        assert!(read_all(&path).is_err(), "a longer {file:?}");
        std::fs::remove_file(file).unwrap();
        assert!(read_all(&path).is_err(), "a missing {file:?}");
        std::fs::write(file, &good).unwrap();
    }
    assert_eq!(read_all(&path).unwrap(), original);
    let shard = path.join("rank-00001.safetensors");
    let mut bytes = std::fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    let text = read_all(&path).unwrap_err().to_string();
    assert!(text.contains("rank-00001.safetensors is not what was written, in `w1` (m)"), "{text}");
}

#[test]
fn another_model_is_refused_by_name() {
    let folder = Folder::new("foreign");
    let path = saved(&options(&folder), 1, 1, 0).swap_remove(0).unwrap();
    let mut checkpoint = Checkpoint::open(&path).unwrap();
    let mut refused = |name: &str, dtype: DType, shape: &[u64]| {
        let key = Key { name: name.into(), state: None };
        let error = checkpoint.read(&key, dtype, &Slice::whole(shape), &mut |_, _| Ok(())).unwrap_err();
        assert_eq!((error.exit(), error.report().code), (5, 511));
        error.to_string()
    };
    assert!(refused("w2", DType::F32, &[7, 6]).contains("no `w2`"));
    assert!(refused("w1", DType::F32, &[6, 7]).contains("f32[7, 6] in the checkpoint, f32[6, 7] in the program"));
    assert!(refused("w1", DType::F16, &[7, 6]).contains("f16[7, 6] in the program, unless by --dtype f32"));
}

/// What `--dtype bf16 --param-dtype bf16` makes of a checkpoint with f32 weights; of state it wants what was saved.
#[test]
fn weights_are_read_as_bf16_too() {
    let folder = Folder::new("narrow");
    let path = saved(&options(&folder), 1, 2, 0).into_iter().next().expect("a rank").unwrap();
    let mut checkpoint = Checkpoint::open(&path).unwrap();
    let slice = slice_of(0, 1, 1, 4);
    let mut found = vec![0; slice.local_elements() as usize * 2];
    let mut write = |at: u64, bytes: &[u8]| {
        found[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        Ok(())
    };
    let key = |state: Option<&str>| Key { name: "w1".into(), state: state.map(Into::into) };
    checkpoint.read(&key(None), DType::BF16, &slice, &mut write).unwrap();
    assert!(checkpoint.read(&key(Some("m")), DType::BF16, &slice, &mut write).is_err());
    let whole = cut(0, &slice);
    slice.for_each_run(|run| {
        for at in run.local as usize..(run.local + run.len) as usize {
            let due = half::bf16::from_f32(f32::from_le_bytes(whole[at * 4..at * 4 + 4].try_into().unwrap()));
            let narrow = half::bf16::from_le_bytes(found[at * 2..at * 2 + 2].try_into().unwrap());
            assert!(narrow == due || narrow.is_nan() && due.is_nan(), "{at}: {narrow}, {due}");
        }
    });
}

/// What `--dtype f64` makes of a checkpoint of f32: weights and state.
#[test]
fn what_is_f32_is_read_as_f64_too() {
    let folder = Folder::new("wide");
    let path = saved(&options(&folder), 1, 2, 0).into_iter().next().expect("a rank").unwrap();
    let mut checkpoint = Checkpoint::open(&path).unwrap();
    let slice = slice_of(0, 1, 1, 4);
    for state in [None, Some("m")] {
        let key = Key { name: "w1".into(), state: state.map(Into::into) };
        let mut read = |dtype: DType| {
            let mut found = vec![0; (slice.local_elements() * dtype.bytes()) as usize];
            let mut write = |at: u64, bytes: &[u8]| {
                found[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
                Ok(())
            };
            checkpoint.read(&key, dtype, &slice, &mut write).unwrap();
            found
        };
        let (narrow, wide) = (read(DType::F32), read(DType::F64));
        for (at, (narrow, wide)) in narrow.chunks_exact(4).zip(wide.chunks_exact(8)).enumerate() {
            let due = f64::from(f32::from_le_bytes(narrow.try_into().unwrap()));
            let wide = f64::from_le_bytes(wide.try_into().unwrap());
            assert!(wide == due || wide.is_nan() && due.is_nan(), "{key} {at}: {wide}, {due}");
        }
        assert!(narrow.iter().any(|&byte| byte != 0), "{key}: all zero");
    }
}

#[test]
fn old_checkpoints_go_and_a_repeated_step_replaces_its_own() {
    let folder = Folder::new("keep");
    let options = Options { keep_last: Some(2), ..options(&folder) };
    for step in [1, 2, 3, 3] {
        saved(&options, step, 2, 0).into_iter().for_each(|result| drop(result.unwrap()));
    }
    let steps: Vec<u64> = steps(&folder.0).unwrap().into_iter().map(|(step, _)| step).collect();
    assert_eq!(steps, [2, 3]);
    read_all(&folder.0.join("step-00000003")).unwrap();
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 2);
}

#[test]
fn a_save_that_fails_fails_on_all_ranks_and_leaves_the_old_ones() {
    let folder = Folder::new("fails");
    saved(&options(&folder), 1, 2, 0).into_iter().for_each(|result| drop(result.unwrap()));
    // A file where the folder would have to be.
    let blocked = Options { dir: folder.0.join("file"), keep_last: None };
    std::fs::write(&blocked.dir, b"").unwrap();
    let results = saved(&blocked, 2, 2, 0);
    let errors: Vec<Error> = results.into_iter().map(|result| result.unwrap_err()).collect();
    assert_eq!(errors[0].exit(), 8, "{}", errors[0]);
    assert!(errors[1].is_secondary(), "{}", errors[1]);
    read_all(&folder.0.join("step-00000001")).unwrap();
}

#[test]
fn a_save_that_ends_while_it_writes_leaves_no_part() {
    let folder = Folder::new("part");
    let no_space = |_: u64, _: &mut [u8]| Err(Error::data_option("no space"));
    let layout = Layout::new(vec![Group(vec![0, 1])], vec![4096; 2]);
    let on = |mut peer: Peer| {
        let (key, dtype, shape) = tensors().swap_remove(0);
        let shard = Shard { key, dtype, slice: Slice::whole(&shape), read: &no_space };
        let shards = if peer.rank() == 1 { vec![shard] } else { Vec::new() };
        let result = save(&mut peer, &options(&folder), &RunState::default(), &shards);
        peer.finish();
        result
    };
    let peers = local::world(&layout, Patience::default()).unwrap();
    let results: Vec<Result<PathBuf>> = std::thread::scope(|scope| {
        let threads: Vec<_> = peers.into_iter().map(|peer| scope.spawn(|| on(peer))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(results.iter().all(|result| result.is_err()), "{results:?}");
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0);
}

/// Changes the index and writes its hash again: what only another writer than ours would write.
fn forged(path: &Path, change: impl Fn(&mut Vec<Tensor>)) -> Error {
    let read = |name: &str| std::fs::read(path.join(name)).unwrap();
    let (index, list) = (read(write::INDEX), read(manifest::NAME));
    let mut forged: write::Index = serde_json::from_slice(&index).unwrap();
    change(&mut forged.tensors);
    let json = serde_json::to_vec(&forged).unwrap();
    let mut entries = manifest::read(path).unwrap();
    let entry = entries.iter_mut().find(|entry| entry.name == write::INDEX).unwrap();
    (entry.bytes, entry.hash) = (json.len() as u64, blake3::hash(&json).to_hex().to_string());
    std::fs::write(path.join(write::INDEX), &json).unwrap();
    std::fs::write(path.join(manifest::NAME), manifest::text(&entries)).unwrap();
    let error = read_all(path).expect_err("an index that contradicts itself");
    std::fs::write(path.join(write::INDEX), &index).unwrap();
    std::fs::write(path.join(manifest::NAME), &list).unwrap();
    error
}

#[test]
fn blocks_are_the_tensor_once() {
    let folder = Folder::new("sound");
    let path = saved(&options(&folder), 1, 2, 0).swap_remove(0).unwrap();
    let check = |what: &str, change: &dyn Fn(&mut Vec<Tensor>)| {
        let error = forged(&path, change);
        let text = error.to_string();
        assert!((error.exit(), error.report().code) == (5, 510) && text.contains(what), "{what} in {text}");
    };
    let of = |tensors: &[Tensor], state: Option<&str>| {
        tensors.iter().position(|t| t.key.name == "w1" && t.key.state.as_deref() == state).unwrap()
    };
    check("18 of 42 elements of `w1` are in no file", &|tensors| {
        let at = of(tensors, None);
        tensors[at].slices.pop();
    });
    check("blocks of `w1` (m) have 66 elements, the tensor 42", &|tensors| {
        let at = of(tensors, Some("m"));
        let first = tensors[at].slices[0].clone();
        tensors[at].slices.push(first);
    });
    // As many elements as there should be, some twice and some not at all.
    check("blocks of `w1` in rank-00000.safetensors and rank-00001.safetensors overlap", &|tensors| {
        let at = of(tensors, None);
        tensors[at].slices[1].start[0] = 3;
    });
    check("a block of `w1` lies outside of the tensor or of rank-00001.safetensors", &|tensors| {
        let at = of(tensors, None);
        tensors[at].slices[1].start[0] = 5;
    });
    check("lies outside of the tensor or of rank-00000.safetensors", &|tensors| {
        let at = of(tensors, None);
        tensors[at].slices[0].offset = u64::MAX - 8;
    });
    check("lies outside of the tensor or of rank-00009.safetensors", &|tensors| {
        let at = of(tensors, None);
        tensors[at].slices[0].file = "rank-00009.safetensors".into();
    });
    check("`w1` twice in the index", &|tensors| {
        let at = of(tensors, None);
        let twice = tensors[at].clone();
        tensors.push(twice);
    });
    check("of dtype `f31`", &|tensors| {
        let at = of(tensors, None);
        tensors[at].dtype = "f31".into();
    });
    check("is too large", &|tensors| {
        let at = of(tensors, None);
        tensors[at].shape = vec![u64::MAX, 6];
    });
    read_all(&path).unwrap();
}

#[test]
fn a_folder_is_surveyed() {
    let folder = Folder::new("survey");
    for step in [1, 2] {
        saved(&options(&folder), step, 2, 0).swap_remove(0).unwrap();
    }
    let path = |name: &str| folder.0.join(name);
    std::fs::create_dir(path(".step-00000004.partial")).unwrap();
    std::fs::create_dir(path("step-00000003")).unwrap();
    std::fs::create_dir(path("other")).unwrap();
    std::fs::write(path("step-00000005"), b"no folder").unwrap();
    std::fs::write(path("step-00000002/MANIFEST"), b"?").unwrap();
    let found = |dir: &Path| -> Vec<(u64, &'static str)> {
        let condition = |condition: &Condition| match condition {
            Condition::Complete(_) => "complete",
            Condition::Incomplete => "incomplete",
            Condition::Damaged(_) => "damaged",
        };
        survey(dir).unwrap().iter().map(|found| (found.step, condition(&found.condition))).collect()
    };
    assert_eq!(found(&folder.0), [(1, "complete"), (2, "damaged"), (3, "incomplete"), (4, "incomplete")]);
    assert_eq!(found(&path("step-00000001")), [(1, "complete")]);
    assert_eq!(found(&path("other")), []);
    assert_eq!(survey(&path("absent")).unwrap_err().exit(), 8);
}

//! Files of every kind to batches, and every way in which data do not fit.

use super::*;
use std::io::Write;
use std::path::Path;

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("dcc-data-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn npy(descr: &str, shape: &str, bytes: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n");
    let mut out = b"\x93NUMPY\x01\x00".to_vec();
    out.extend((header.len() as u16).to_le_bytes());
    out.extend(header.as_bytes());
    out.extend(bytes);
    out
}

fn bytes_of(values: impl IntoIterator<Item = i64>) -> Vec<u8> {
    values.into_iter().flat_map(i64::to_le_bytes).collect()
}

fn input(name: &str, dtype: DType, shape: &[u64]) -> Input {
    Input { name: name.to_owned(), dtype, shape: shape.to_vec(), batch_dim: Some(0), vocabulary: None, ignore_index: None }
}

fn sequential() -> Options {
    Options { order: Order::Sequential, ..Options::default() }
}

fn at(samples: u64) -> Position {
    Position { steps: 0, samples }
}

fn filled(data: &Dataset, index: usize, position: Position, rows: Range<u64>, bytes: usize) -> Vec<i64> {
    let mut out = vec![0; bytes];
    data.fill(index, position, rows, &mut out);
    out.as_chunks::<8>().0.iter().map(|&b| i64::from_ne_bytes(b)).collect()
}

#[test]
fn samples_of_every_kind_of_file_are_the_same() {
    let folder = Folder::new("kinds");
    let x = npy("<i8", "(5, 2)", &bytes_of(0..10));
    let y = npy("|u1", "(5,)", &[0, 1, 2, 3, 4]);
    let inner = Folder::new("kinds-inner");
    inner.file("x.npy", &x);
    inner.file("labels.npy", &y);
    let mut paths = vec![inner.0.clone()];
    for method in [npyz::zip::CompressionMethod::Stored, npyz::zip::CompressionMethod::Deflated] {
        let path = folder.file(&format!("{method:?}.npz"), b"");
        let mut zip = npyz::zip::ZipWriter::new(std::fs::File::create(&path).unwrap());
        for (name, content) in [("x.npy", &x), ("labels.npy", &y)] {
            zip.start_file(name, npyz::zip::write::FileOptions::default().compression_method(method)).unwrap();
            zip.write_all(content).unwrap();
        }
        zip.finish().unwrap();
        paths.push(path);
    }
    let values = bytes_of(0..10);
    let view = |dtype, shape: &[usize], data| safetensors::tensor::TensorView::new(dtype, shape.to_vec(), data).unwrap();
    let tensors = [
        ("x", view(safetensors::Dtype::I64, &[5, 2], &values)),
        ("labels", view(safetensors::Dtype::U8, &[5], &[0, 1, 2, 3, 4])),
    ];
    paths.push(folder.file("d.safetensors", &safetensors::serialize(tensors, None).unwrap()));
    for path in paths {
        let files = Files::open(std::slice::from_ref(&path), &[]).unwrap();
        let inputs = [input("x", DType::I64, &[2, 2]), input("labels", DType::I64, &[2])];
        let data = Dataset::open(&files, &inputs, &sequential()).unwrap();
        assert_eq!(data.len(), Some(5), "{path:?}");
        assert_eq!(filled(&data, 0, at(2), 0..2, 32), [4, 5, 6, 7], "{path:?}");
        assert_eq!(filled(&data, 1, at(4), 1..2, 8), [1], "the fifth sample is dropped: {path:?}");
    }
}

/// Of what unpacks to far more than its header says, one byte more is read.
#[test]
fn compressed_arrays_are_read_as_far_as_their_header_says() {
    let folder = Folder::new("bomb");
    let path = folder.file("bomb.npz", b"");
    let mut zip = npyz::zip::ZipWriter::new(std::fs::File::create(&path).unwrap());
    let deflated = npyz::zip::CompressionMethod::Deflated;
    zip.start_file("x.npy", npyz::zip::write::FileOptions::default().compression_method(deflated)).unwrap();
    zip.write_all(&npy("<i8", "(5, 2)", &vec![0; 64 << 20])).unwrap();
    zip.finish().unwrap();
    let error = Files::open(std::slice::from_ref(&path), &[]).unwrap_err();
    assert!(error.to_string().contains("has 81 bytes, not 80"), "{error}");
}

#[test]
fn token_files_give_inputs_and_labels_shifted_by_one() {
    let folder = Folder::new("tokens");
    let words = |range: Range<u16>| range.flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
    let mut llm_c = [20240520u32, 1, 9].iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    llm_c.resize(1024, 0);
    llm_c.extend(words(0..9));
    let paths = [
        folder.file("nano.bin", &words(0..9)),
        folder.file("llm.bin", &llm_c),
        folder.file("tokens.npy", &npy("<u2", "(9,)", &words(0..9))),
    ];
    let inputs = [input("ids", DType::I64, &[2, 4]), input("labels", DType::I64, &[2, 4])];
    for path in &paths {
        let files = Files::open(std::slice::from_ref(path), &[]).unwrap();
        let data = Dataset::open(&files, &inputs, &sequential()).unwrap();
        assert_eq!(data.len(), Some(2), "{path:?}");
        assert_eq!(filled(&data, 0, at(0), 0..2, 64), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(filled(&data, 1, at(0), 1..2, 32), [5, 6, 7, 8]);
    }
    // Several parts, one too short for a sample.
    let parts =
        [folder.file("a.bin", &words(0..9)), folder.file("b.bin", &words(0..3)), folder.file("c.bin", &words(100..105))];
    let data = Dataset::open(&Files::open(&parts, &[]).unwrap(), &inputs[..1], &sequential()).unwrap();
    assert_eq!(data.len(), Some(3));
    assert_eq!(filled(&data, 0, at(0), 1..2, 32), [4, 5, 6, 7]);
    let one = [input("ids", DType::I64, &[1, 4])];
    let data = Dataset::open(&Files::open(&parts, &[]).unwrap(), &one, &sequential()).unwrap();
    assert_eq!(filled(&data, 0, at(2), 0..1, 32), [100, 101, 102, 103]);
}

/// Files in the order given, one of them empty; by samples and by steps.
#[test]
fn arrays_of_one_name_are_parts_of_one() {
    let folder = Folder::new("parts");
    let folders = ["b", "a", "c"].map(|name| folder.0.join(name));
    let part = |at: usize, shape: &str, values: Range<i64>| {
        std::fs::create_dir_all(&folders[at]).unwrap();
        std::fs::write(folders[at].join("x.npy"), npy("<i8", shape, &bytes_of(values))).unwrap();
    };
    part(0, "(3, 2)", 0..6);
    part(1, "(0, 2)", 0..0);
    part(2, "(2, 2)", 6..10);
    let open = |options: &Options, shape: &[u64]| {
        let files = Files::open(&folders, &[("x".to_owned(), "y".to_owned())])?;
        Dataset::open(&files, &[input("y", DType::I64, shape)], options)
    };
    let data = open(&sequential(), &[2, 2]).unwrap();
    assert_eq!(data.len(), Some(5));
    assert_eq!(filled(&data, 0, at(2), 0..2, 32), [4, 5, 6, 7]);
    let data = open(&Options { layout: Layout::Steps, ..sequential() }, &[2]).unwrap();
    let third = Position { steps: 3, samples: 0 };
    assert_eq!((data.len(), filled(&data, 0, third, 0..2, 16)), (Some(5), vec![6, 7]));
    std::fs::write(folders[1].join("x.npy"), npy("<i4", "(1, 2)", &[0; 8])).unwrap();
    let error = open(&sequential(), &[2, 2]).unwrap_err().to_string();
    assert!(error.contains("the parts of `y` are of i64 and i32"), "{error}");
}

#[test]
fn ranks_and_microbatches_share_a_batch_in_any_plan() {
    let folder = Folder::new("slices");
    let path = folder.file("x.npy", &npy("<i8", "(24, 1)", &bytes_of(0..24)));
    let files = Files::open(&[path], &[]).unwrap();
    let data = Dataset::open(&files, &[input("x", DType::I64, &[8, 1])], &Options { seed: 3, ..Options::default() }).unwrap();
    let whole = filled(&data, 0, at(8), 0..8, 64);
    for (microbatches, ranks) in [(1, 1), (2, 1), (1, 4), (2, 2), (4, 2), (8, 1)] {
        let parts = (0..microbatches).flat_map(|i| (0..ranks).map(move |r| rows(8, (i, microbatches), (r, ranks))));
        let joined: Vec<i64> =
            parts.flat_map(|rows| filled(&data, 0, at(8), rows.clone(), (rows.end - rows.start) as usize * 8)).collect();
        assert_eq!(joined, whole, "{microbatches} microbatches, {ranks} ranks");
    }
    let mut pass: Vec<i64> = (0..3).flat_map(|step| filled(&data, 0, at(step * 8), 0..8, 64)).collect();
    pass.sort();
    assert_eq!(pass, (0..24).collect::<Vec<_>>());
}

#[test]
fn other_orders_of_the_same_data_are_known() {
    let folder = Folder::new("orders");
    let open = |first: i64, order, seed| {
        let path = folder.file(&format!("{first}.npy"), &npy("<i8", "(8, 1)", &bytes_of(first..first + 8)));
        let files = Files::open(&[path], &[(first.to_string(), "x".to_owned())]).unwrap();
        let options = Options { order, seed, ..Options::default() };
        Dataset::open(&files, &[input("x", DType::I64, &[4, 1])], &options).unwrap()
    };
    let data = open(0, Order::Shuffled, 3);
    for (order, seed) in [(Order::Shuffled, 3), (Order::Shuffled, 4), (Order::Sequential, 3)] {
        let (other, another) = (open(0, order, seed).fingerprint(), open(1, order, seed).fingerprint());
        assert!(data.fingerprint_in(order, seed) == other && other != another, "{order:?} {seed}");
        assert_eq!(data.fingerprint() == other, (order, seed) == (Order::Shuffled, 3), "{order:?} {seed}");
    }
}

#[test]
fn a_batch_dim_behind_others_is_interleaved() {
    let folder = Folder::new("time-major");
    // Three samples of two time steps of two values; the input is [time, batch, 2].
    let path = folder.file("x.npy", &npy("<i8", "(3, 2, 2)", &bytes_of(0..12)));
    let mut time_major = input("x", DType::I64, &[2, 3, 2]);
    time_major.batch_dim = Some(1);
    let data = Dataset::open(&Files::open(&[path], &[]).unwrap(), &[time_major], &sequential()).unwrap();
    assert_eq!(filled(&data, 0, at(0), 0..3, 96), [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]);
    assert_eq!(filled(&data, 0, at(0), 1..2, 32), [4, 5, 6, 7]);
}

#[test]
fn steps_are_fed_whole_and_inputs_are_filled() {
    let folder = Folder::new("steps");
    let x = folder.file("x.npy", &npy("<i8", "(2, 2, 2)", &bytes_of(0..8)));
    let state = folder.file("state.npy", &npy("<i8", "(2, 3)", &bytes_of(10..16)));
    let mask = folder.file("mask.npy", &npy("<i8", "(1, 2)", &bytes_of([7, 8])));
    let mut unbatched = input("state", DType::I64, &[3]);
    unbatched.batch_dim = None;
    let inputs = [
        input("x", DType::I64, &[2, 2]),
        unbatched,
        input("positions", DType::I64, &[2, 3]),
        input("ones", DType::I64, &[2]),
        input("mask", DType::I64, &[2, 2]),
    ];
    let fills = [("positions", "arange"), ("ones", "ones"), ("mask", &format!("@{}", mask.display()))];
    let fills = fills.iter().map(|(name, fill)| ((*name).to_owned(), Fill::parse(fill).unwrap())).collect();
    let options = Options { layout: Layout::Steps, fills, ..Options::default() };
    let data = Dataset::open(&Files::open(&[x, state], &[]).unwrap(), &inputs, &options).unwrap();
    let step = |steps| Position { steps, samples: 0 };
    assert_eq!(filled(&data, 0, step(1), 1..2, 16), [6, 7]);
    assert_eq!(filled(&data, 0, step(2), 0..2, 32), [0, 1, 2, 3], "wraps around");
    assert_eq!(filled(&data, 1, step(1), 1..2, 24), [13, 14, 15], "unbatched: whole for every microbatch");
    assert_eq!(filled(&data, 2, step(0), 0..2, 48), [0, 1, 2, 0, 1, 2]);
    assert_eq!(filled(&data, 3, step(5), 0..2, 16), [1, 1]);
    assert_eq!(filled(&data, 4, step(5), 0..2, 32), [7, 8, 7, 8]);
}

/// The error of opening `files` for `inputs`.
fn refused(paths: &[&Path], map: &[(&str, &str)], inputs: &[Input], options: &Options) -> String {
    let paths: Vec<PathBuf> = paths.iter().map(|path| path.to_path_buf()).collect();
    let map: Vec<(String, String)> = map.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
    let result = Files::open(&paths, &map).and_then(|files| Dataset::open(&files, inputs, options));
    result.expect_err("an error").to_string()
}

#[test]
fn what_does_not_fit_is_named() {
    let folder = Folder::new("errors");
    let x = folder.file("x.npy", &npy("<i8", "(4, 2)", &bytes_of(0..8)));
    let plain = [input("x", DType::I64, &[2, 2])];
    let options = sequential();
    let check = |text: String, parts: &[&str]| parts.iter().for_each(|part| assert!(text.contains(part), "{part} in {text}"));
    let y = [input("y", DType::I64, &[2, 2])];
    check(refused(&[&x], &[], &y, &options), &["DCC0051", "`x`, which is no input", "inputs: y", "--map x=INPUT"]);
    check(refused(&[&x], &[("z", "y")], &y, &options), &["no key `z`", "keys: x"]);
    check(refused(&[&x, &x], &[], &plain, &options), &["`x` twice"]);
    let two = [plain[0].clone(), input("mask", DType::I64, &[2])];
    check(refused(&[&x], &[], &two, &options), &["`mask` has no data", "--input mask=ones"]);
    check(refused(&[&x], &[], &[input("x", DType::I64, &[2, 3])], &options), &["DCC0052", "[4, 2]", "needs [samples, 3]"]);
    check(refused(&[&x], &[], &[input("x", DType::I64, &[5, 2])], &options), &["4 samples, one batch needs 5", "x.npy"]);
    let mut bounded = plain[0].clone();
    bounded.vocabulary = Some(7);
    check(refused(&[&x], &[], &[bounded], &options), &["DCC0053", "value 7 (element 7) is not an index below 7", "x.npy"]);
    let mut unbatched = plain[0].clone();
    unbatched.batch_dim = None;
    check(refused(&[&x], &[], &[unbatched], &options), &["no batch dim", "--layout steps"]);
    let fills = vec![("q".to_owned(), Fill::Ones)];
    check(refused(&[&x], &[], &plain, &Options { fills, ..sequential() }), &["--input q: no such input"]);
    let labels = folder.file("labels.npy", &npy("<i8", "(3, 1)", &bytes_of(0..3)));
    let uneven = [plain[0].clone(), input("labels", DType::I64, &[2, 1])];
    check(refused(&[&x, &labels], &[], &uneven, &options), &["`x` has 4 samples, `labels` 3", "x.npy", "labels.npy"]);
    let rows = [plain[0].clone(), input("labels", DType::I64, &[4, 1])];
    let four = folder.file("four.npy", &npy("<i8", "(4, 1)", &bytes_of(0..4)));
    let mapped = Files::open(&[x.clone(), four], &[("four".to_owned(), "labels".to_owned())]).expect("files");
    let error = Dataset::open(&mapped, &rows, &options).expect_err("more rows than samples").to_string();
    check(error, &["DCC0052", "2 samples of `x`, but 4 rows of `labels`", "--layout steps"]);
    assert!(Fill::parse("twos").is_err());
    check(refused(&[&folder.0.join("none.npz")], &[], &plain, &options), &["DCC0801", "none.npz"]);
    let text = folder.file("readme.txt", b"hello, this is text");
    check(refused(&[&text], &[], &plain, &options), &["DCC0050", "no kind of data file"]);
    let tokens = folder.file("t.bin", &[0; 40]);
    check(refused(&[&tokens], &[], &[input("x", DType::F32, &[2, 2])], &options), &["no input takes integers"]);
}

#[test]
fn damaged_files_are_errors_wherever_they_are_cut_or_changed() {
    let folder = Folder::new("damage");
    let good = npy("<i8", "(4, 2)", &bytes_of(0..8));
    let values = bytes_of(0..8);
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::I64, vec![4, 2], &values).unwrap();
    let tensors = safetensors::serialize([("x", view)], None).unwrap();
    let mut zip = npyz::zip::ZipWriter::new(Cursor::new(Vec::new()));
    zip.start_file("x.npy", npyz::zip::write::FileOptions::default()).unwrap();
    zip.write_all(&good).unwrap();
    let archive = zip.finish().unwrap().into_inner();
    for (name, good) in [("x.npy", good), ("x.safetensors", tensors), ("x.npz", archive)] {
        for length in 0..good.len() {
            let path = folder.file(name, &good[..length]);
            assert!(Files::open(&[path], &[]).is_err(), "{name} cut to {length}");
        }
        // A flipped bit may leave a readable file with other values, but never a panic.
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            let _ = Files::open(&[folder.file(name, &bad)], &[]);
        }
    }
    for shape in ["(99999999999, 99999999999)", "(-1,)", "(4", "(x,)", "(18446744073709551616,)"] {
        assert!(Files::open(&[folder.file("x.npy", &npy("<i8", shape, &[]))], &[]).is_err(), "{shape}");
    }
    for descr in [">i8", "<c16", "<U4", "", "|O"] {
        assert!(Files::open(&[folder.file("x.npy", &npy(descr, "(1, 1)", &[0; 8]))], &[]).is_err(), "{descr}");
    }
}

use std::io::Cursor;

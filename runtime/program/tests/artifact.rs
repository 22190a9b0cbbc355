//! The `.dcc` file: what is written is read, the same bytes each time; what is damaged is refused by the part that is.

use bytes::Bytes;
use dcc_program::DType;
use dcc_program::artifact::{Artifact, ArtifactError, Data, Tensor};
use dcc_program::text::parse;

fn sample() -> Artifact {
    let tensor = |name: &str, shape: [u64; 2], data| Tensor {
        name: name.to_owned(),
        dtype: DType::F32,
        shape: shape.into_iter().collect(),
        data,
    };
    let file = Data::File { path: "model.onnx".to_owned(), offset: 16, bytes: 96, file_bytes: 1000 };
    let embedded = Data::Embedded(Bytes::from(vec![7u8; 72]));
    let options = serde_json::json!({ "tp": 2, "lr": 0.1 }).as_object().cloned().unwrap_or_default();
    Artifact {
        train: vec![parse(include_str!("programs/mlp_tp2.txt")).unwrap()],
        eval: Vec::new(),
        forward: "graph\n".to_owned(),
        tensors: vec![tensor("fc1.weight", [4, 6], file), tensor("fc2.weight", [6, 3], embedded)],
        code: [("sm_90a.0", vec![3u8; 70]), ("compute_80.0", vec![4; 5])]
            .map(|(name, bytes)| (name.to_owned(), Bytes::from(bytes)))
            .into(),
        options,
    }
}

fn encode(artifact: &Artifact) -> Vec<u8> {
    let mut out = Vec::new();
    artifact.write(&mut out).unwrap();
    out
}

#[test]
fn artifacts_round_trip() {
    let artifact = sample();
    let bytes = encode(&artifact);
    assert_eq!(bytes, encode(&artifact));
    let read = Artifact::decode(bytes.clone().into()).unwrap();
    assert_eq!(read, artifact);
    assert_eq!((read.hash(), encode(&read)), (artifact.hash(), bytes.clone()));
    let Data::Embedded(data) = &read.tensors[1].data else { panic!("{:?}", read.tensors[1]) };
    assert_eq!(data[..], [7; 72]);
    // The first line names the hash of the whole.
    assert!(String::from_utf8_lossy(&bytes[..100]).contains(artifact.hash().to_hex().as_str()));
}

#[test]
fn every_damaged_byte_is_noticed() {
    let bytes = encode(&sample());
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x20;
        assert!(Artifact::decode(damaged.into()).is_err(), "byte {at} of {}", bytes.len());
    }
    for length in 0..bytes.len() {
        assert!(Artifact::decode(Bytes::copy_from_slice(&bytes[..length])).is_err(), "{length} of {} bytes", bytes.len());
    }
    let mut longer = bytes.clone();
    longer.push(0);
    assert!(Artifact::decode(longer.into()).is_err());
}

#[test]
fn errors_name_the_part() {
    let bytes = encode(&sample());
    let error = |bytes: Vec<u8>| Artifact::decode(bytes.into()).unwrap_err().to_string();
    let at_tensor = bytes.windows(72).position(|w| w == [7; 72]).unwrap();
    let damaged = |at: usize| {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        error(damaged)
    };
    assert!(damaged(at_tensor).contains("damaged in its tensor.1"), "{}", damaged(at_tensor));
    assert!(damaged(bytes.len() - 1).contains("damaged in its code.sm_90a.0"), "{}", damaged(bytes.len() - 1));
    assert!(damaged(200).contains("damaged in its header"));
    let program = bytes.windows(7).position(|w| w == b"program").unwrap();
    assert!(damaged(program).contains("damaged in its train.0"));
    assert!(error(bytes[..program + 10].to_vec()).contains("cut off in its train.0"));
    assert!(error(bytes[..50].to_vec()).contains("cut off in its first line"));
    assert!(error(b"\x08\x07\x12\x07pytorch".to_vec()).contains("no dcc artifact"));
    let mut newer = bytes.clone();
    newer[13] = b'9';
    assert!(error(newer).contains("format 9"));
}

#[test]
fn unsound_programs_do_not_load() {
    let mut artifact = sample();
    artifact.train[0].buffers[14].offset = 44;
    let error = Artifact::decode(encode(&artifact).into()).unwrap_err();
    assert!(matches!(error, ArtifactError::Unsound { .. }), "{error}");
    let mut artifact = sample();
    artifact.tensors.remove(0);
    assert!(Artifact::decode(encode(&artifact).into()).unwrap_err().to_string().contains("fc1.weight: has no initial values"));
    let mut artifact = sample();
    artifact.tensors[0].shape[0] = 5;
    assert!(Artifact::decode(encode(&artifact).into()).is_err());
}

#[test]
fn tensors_are_read_from_files_of_the_size_they_had() {
    let folder = std::env::temp_dir().join(format!("dcc-artifact-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("model.onnx"), vec![3u8; 1000]).unwrap();
    std::fs::write(folder.join("a.dcc"), encode(&sample())).unwrap();
    let artifact = Artifact::load(&folder.join("a.dcc")).unwrap();
    let bytes = artifact.tensors[0].bytes(&folder).unwrap().unwrap();
    assert_eq!(bytes[..], [3; 96]);
    std::fs::write(folder.join("model.onnx"), vec![3u8; 999]).unwrap();
    let error = artifact.tensors[0].bytes(&folder).unwrap_err().to_string();
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(error.contains("has 999 bytes, 1000 when it was compiled"), "{error}");
    assert!(matches!(Artifact::load(&std::env::temp_dir()), Err(ArtifactError::Io { .. })));
}

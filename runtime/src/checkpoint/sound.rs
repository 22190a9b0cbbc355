//! What an index must say to be one: blocks inside of their tensors and files, which together are each tensor once.

use super::manifest::Entry;
use super::write::{Index, Piece, Tensor};
use dcc_program::DType;
use std::collections::{BTreeMap, BTreeSet};

/// Cheap checks, of numbers alone, so that nothing that follows them leaves a file or a tensor. Errors: what is wrong, with tensor
/// and file.
pub fn index(index: &Index, files: &[Entry]) -> Result<(), String> {
    let files: BTreeMap<&str, u64> = files.iter().map(|file| (file.name.as_str(), file.bytes)).collect();
    let mut known = BTreeSet::new();
    for tensor in &index.tensors {
        let key = &tensor.key;
        if !known.insert(key) {
            return Err(format!("damaged: {key} twice in the index"));
        }
        let dtype = DType::parse(&tensor.dtype).ok_or_else(|| format!("damaged: {key} of dtype `{}`", tensor.dtype))?;
        let whole = product(&tensor.shape).ok_or_else(|| format!("damaged: {key} is too large: {:?}", tensor.shape))?;
        let mut held = 0u64;
        for piece in &tensor.slices {
            let elements = block(tensor, piece, dtype, &files)
                .ok_or_else(|| format!("damaged: a block of {key} lies outside of the tensor or of {}", piece.file))?;
            held = held.saturating_add(elements);
        }
        if held < whole {
            return Err(format!("damaged: {} of {whole} elements of {key} are in no file", whole - held));
        }
        if held > whole {
            return Err(format!("damaged: blocks of {key} have {held} elements, the tensor {whole}"));
        }
    }
    Ok(())
}

/// Elements of a block that lies where it can.
fn block(tensor: &Tensor, piece: &Piece, dtype: DType, files: &BTreeMap<&str, u64>) -> Option<u64> {
    let dims = tensor.shape.len();
    let inside = |dim: usize| piece.start[dim].checked_add(piece.extent[dim]).is_some_and(|end| end <= tensor.shape[dim]);
    if piece.start.len() != dims || piece.extent.len() != dims {
        return None;
    }
    // The last ranks of an uneven shard have nothing, from beyond the end on.
    if !piece.extent.contains(&0) && !(0..dims).all(inside) {
        return None;
    }
    let elements = product(&piece.extent)?;
    let end = elements.checked_mul(dtype.bytes())?.checked_add(piece.offset)?;
    files.get(piece.file.as_str()).filter(|&&bytes| end <= bytes).map(|_| elements)
}

fn product(dims: &[u64]) -> Option<u64> {
    dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim))
}

/// Blocks that have as many elements as the tensor, and do not overlap, are the tensor. Errors: two that do.
pub fn no_overlap(tensor: &Tensor) -> Result<(), String> {
    let mut pieces: Vec<&Piece> = tensor.slices.iter().filter(|piece| !piece.extent.contains(&0)).collect();
    pieces.sort_by(|a, b| a.start.cmp(&b.start));
    let end = |piece: &Piece, dim: usize| piece.start[dim] + piece.extent[dim];
    for (at, a) in pieces.iter().enumerate() {
        let near = pieces[at + 1..].iter().take_while(|b| a.start.is_empty() || b.start[0] < end(a, 0));
        for b in near {
            if (0..a.start.len()).all(|dim| b.start[dim] < end(a, dim) && a.start[dim] < end(b, dim)) {
                return Err(format!("damaged: blocks of {} in {} and {} overlap", tensor.key, a.file, b.file));
            }
        }
    }
    Ok(())
}

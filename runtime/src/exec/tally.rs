//! What one step of a program does on one rank, counted when it is loaded.

/// Per step, on this rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Tally {
    /// Runs of generated kernels.
    pub jit: u64,
    /// Runs of library kernels.
    pub library: u64,
    /// Operations that were interpreted: none, ever.
    pub interp: u64,
    /// Transfers started.
    pub transfers: u64,
    /// Bytes of the larger of operand and result of all transfers.
    pub transfer_bytes: u64,
    /// Bytes read from other ranks' memory, counted as they were in the last step.
    pub received_bytes: u64,
    /// Multiplications and additions of matrix products and attention.
    pub flops: u64,
}

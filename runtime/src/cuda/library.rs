//! Library operations as prepared calls: the loops are those of every device, the texts those of `dcc_kernels::cuda::library`.

use super::device::{Call, Key, Texts};
use crate::error::{Error, Result};
use crate::exec::{Site, Span};
use crate::library::attention::{self, Pass};
use crate::library::convolution::Geometry;
use crate::library::{arity, contraction, indexed, pool, rows};
use dcc_kernels::cuda::Source;
use dcc_kernels::cuda::library::product::Types;
use dcc_kernels::cuda::library::rows::Rows;
use dcc_kernels::cuda::library::{attention as attending, pool as pooling, product, rows as copying, scan, scatter, top_k};
use dcc_program::program::{Instr, Library, StoreMode};
use dcc_program::types::DType;

/// What blocks of memory are aligned to, and with them buffers of a multiple of it.
const ALIGN: usize = 16;

impl Texts {
    /// As `Device::library`.
    pub fn library(&mut self, site: &Site<'_>, library: &Library, instr: &Instr) -> Result<Option<Call>> {
        let mut call = self.operation(site, library, instr)?;
        if let Some(call) = &mut call {
            call.reads = call.operands.len() - instr.results.len();
            call.is_passed_on = matches!(instr.results[..], [result] if site.is_passed_on(result));
        }
        Ok(call)
    }

    fn operation(&mut self, site: &Site<'_>, library: &Library, instr: &Instr) -> Result<Option<Call>> {
        let (wanted, results) = arity(library);
        if instr.operands.len() != wanted || instr.results.len() != results {
            return Err(Error::artifact("an operation with too many or too few operands"));
        }
        let spans = instr.operands.iter().chain(&instr.results).map(|&id| site.span(id)).collect::<Result<Vec<Span>>>()?;
        let result = instr.results[0];
        let to = site.span(result)?;
        match library {
            Library::Dot { spec, mode } => {
                let (factors, dtypes) = contraction::loops(site, spec, instr)?;
                let types = Types { operands: dtypes[0], result: dtypes[2], mode: *mode };
                let flops = 2 * factors.iter().map(|f| f.size as u64).product::<u64>();
                let elements = elements(&spans, dtypes);
                self.made(format!("{factors:?} {types:?} {elements:?}"), spans, flops, |name| {
                    product::dot(&factors, types, elements, name)
                })
            }
            Library::Convolution { spec, windows, mode } => {
                self.convolution(Geometry::new(site, (spec, windows), instr)?, *mode, spans)
            }
            Library::MaxPool(windows) => {
                let (plan, dtype) = pool::geometry(site, windows, instr)?;
                self.made(format!("{windows:?} {dtype:?} {spans:?}"), spans, 0, |name| pooling::max_pool(&plan, dtype, name))
            }
            Library::ScatterAdd { spec, indexed, mode } => {
                let places = indexed::places(site, (spec, indexed), instr)?;
                let key = format!("{:?} {:?} {:?} {mode:?}", places.factors, places.indexed, places.dtypes);
                self.made(key, spans, 0, |name| {
                    scatter::scatter_add((&places.factors, places.indexed), places.dtypes, *mode, name)
                })
            }
            Library::Cumsum { dim, exclusive, reverse } => {
                let (plan, dtype) = indexed::runs(site, (*dim, *exclusive, *reverse), instr)?;
                self.made(format!("{plan:?} {dtype:?}"), spans, 0, |name| scan::cumsum(&plan, dtype, name))
            }
            Library::TopK { dim, k, largest } => {
                let (plan, dtype) = indexed::first(site, (*dim, *k, *largest), instr)?;
                self.made(format!("{plan:?} {dtype:?}"), spans, 0, |name| top_k::top_k(&plan, dtype, name))
            }
            Library::Attention(attention) => {
                let (shape, dtype) = attention::geometry(site, attention, instr, Pass::Forward)?;
                self.made(format!("attention {shape:?} {dtype:?} {:?}", attention.mask), spans, 0, |name| {
                    attending::forward(&shape, dtype, attention.mask, name)
                })
            }
            Library::AttentionGrad(attention) => {
                let (shape, dtype) = attention::geometry(site, attention, instr, Pass::Backward)?;
                self.made(format!("gradient {shape:?} {dtype:?} {:?}", attention.mask), spans, 0, |name| {
                    attending::backward(&shape, dtype, attention.mask, name)
                })
            }
            Library::Zero { .. } => self.zero(to),
            Library::KeepFirst { axis } if site.coordinates(0).get(*axis) != 0 => self.zero(to),
            Library::SliceAxis { axis, dim } => {
                let rows = rows::slice(site, (axis.0.into(), usize::from(*dim)), instr.operands[0], result)?;
                rows.map_or(Ok(None), |rows| self.rows(rows))
            }
            Library::Reshape { .. }
            | Library::Copy
            | Library::KeepFirst { .. }
            | Library::ResolveMicrobatches
            | Library::DropMicrobatch { .. } => {
                rows::copy(site.span(instr.operands[0])?, to)?.map_or(Ok(None), |rows| self.rows(rows))
            }
        }
    }

    fn convolution(&mut self, geometry: Geometry, mode: StoreMode, spans: Vec<Span>) -> Result<Option<Call>> {
        let Geometry { form, plain, spatial, dtypes } = geometry;
        let types = Types { operands: dtypes[0], result: dtypes[2], mode };
        let taps = spatial.iter().map(|s| (s.sizes[1] * s.sizes[2]) as u64).product::<u64>();
        let flops = 2 * taps * plain.iter().map(|f| f.size as u64).product::<u64>();
        let elements = elements(&spans, dtypes);
        self.made(format!("{form:?} {plain:?} {spatial:?} {types:?} {elements:?}"), spans, flops, |name| {
            product::convolution((form, &plain, &spatial), types, elements, name)
        })
    }

    fn made(
        &mut self,
        key: String,
        spans: Vec<Span>,
        flops: u64,
        source: impl FnOnce(&str) -> std::result::Result<Source, String>,
    ) -> Result<Option<Call>> {
        self.call(Key::Library(key), spans, flops, |_, name| source(name)).map(Some)
    }

    fn zero(&mut self, to: Span) -> Result<Option<Call>> {
        let alignment = alignment(&[to.offset]);
        let bytes = to.bytes;
        self.made(format!("zero {bytes} {alignment}"), vec![to], 0, |name| copying::zero(bytes, alignment, name))
    }

    /// Rows that begin somewhat into their operand, and further with each microbatch.
    fn rows(&mut self, rows: rows::Rows) -> Result<Option<Call>> {
        let rows::Rows { from, to, count, bytes, from_stride, to_stride, skip, next } = rows;
        let alignment = alignment(&[from.offset, to.offset, skip, next]);
        let all = Rows { count, bytes, from_stride, to_stride, alignment };
        let call = self.made(format!("{all:?}"), vec![from, to], 0, |name| copying::copy(&all, name))?;
        Ok(call.map(|call| call.beginning(skip, next)))
    }
}

/// Elements of lhs, rhs and out.
fn elements(spans: &[Span], dtypes: [DType; 3]) -> [usize; 3] {
    std::array::from_fn(|i| spans[i].bytes / dtypes[i].bytes() as usize)
}

/// The largest power of two, up to `ALIGN`, that divides all.
fn alignment(offsets: &[usize]) -> usize {
    let fits = |alignment: &usize| offsets.iter().all(|offset| offset.is_multiple_of(*alignment));
    (0..).map(|shift| ALIGN >> shift).find(fits).unwrap_or(1)
}

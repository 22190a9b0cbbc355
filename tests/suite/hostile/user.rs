//! What a user does with a model that is a stranger's: every flag that reads it, at small sizes.

use super::mutate::Random;
use bytes::Bytes;
use dcc::compile::BatchNorm;
use dcc::import::proto::tensor_shape_proto::dimension::Value as Dim;
use dcc::import::proto::type_proto;
use dcc::import::proto::type_proto::Value as Type;
use dcc::import::{self, Exposed, Model, Options, TensorData, onnx, size_inputs};
use dcc::loss::{LossKind, LossOptions};
use dcc::optimizer::{Optimizer, OptimizerOptions};
use dcc::plan::{Parallel, batch};
use dcc::train::TrainingOptions;
use dcc_program::DType;

/// How far a case came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    NoModel,
    Refused,
    Imported,
}

/// All that reads a model before it is compiled.
pub fn import(bytes: Vec<u8>, random: &mut Random) -> End {
    let Ok(model) = Model::decode(Bytes::from(bytes)) else { return End::NoModel };
    model.external_locations();
    let options = options(&model, random);
    match onnx(&model, &options) {
        Ok(_) => End::Imported,
        Err(error) => {
            assert_ne!(error.code.exit(), 1, "{error}");
            End::Refused
        }
    }
}

/// Sizes for all that the file leaves open.
fn options(model: &Model, random: &mut Random) -> Options {
    let mut options = Options { global_batch: Some([1, 2, 3, 4, 8][random.below(5)]), ..Options::default() };
    if random.below(2) == 0 {
        options.global_batch = None;
        options.batch_dims = model.graph().input.iter().map(|input| (input.name().to_owned(), None)).collect();
    }
    let size = [4, 4, 1, 2, 7][random.below(5)];
    let sized = size_inputs(model).unwrap_or_default();
    for input in &model.graph().input {
        let Some(Type::TensorType(tensor)) = input.r#type.as_ref().and_then(|ty| ty.value.as_ref()) else { continue };
        for (at, dim) in tensor.shape.iter().flat_map(|shape| shape.dim.iter().enumerate()) {
            let symbol = match &dim.value {
                Some(Dim::DimValue(_)) => continue,
                Some(Dim::DimParam(symbol)) if !symbol.is_empty() => symbol.clone(),
                _ => format!("{}.{at}", input.name()),
            };
            if at > 0 || options.global_batch.is_none() {
                options.dims.insert(symbol, size);
            }
        }
        if sized.contains(input.name())
            && random.below(4) > 0
            && let Some(value) = known(input.name(), tensor, random)
        {
            options.constants.insert(input.name().to_owned(), value);
        }
    }
    // Only inputs that are initializers too are none.
    options.batch_dims.retain(|name, _| model.graph().initializer.iter().all(|tensor| tensor.name() != name));
    if random.below(8) == 0 {
        options.dropout = [import::Dropout::Off, import::Dropout::Rate(0.5)][random.below(2)];
        options.batch_norm = [import::BatchNorm::Frozen, import::BatchNorm::Groups(2)][random.below(2)];
        options.exposed = Exposed::All;
    }
    options
}

/// What a user would bind a shape, an axis or a count to, or not.
fn known(name: &str, ty: &type_proto::Tensor, random: &mut Random) -> Option<import::Tensor> {
    let dtype = import::dtype(ty.elem_type()).ok().filter(|dtype| !dtype.is_float())?;
    let dims = ty.shape.as_ref()?.dim.iter().map(|dim| match dim.value {
        Some(Dim::DimValue(value)) => u64::try_from(value).ok(),
        _ => Some(1),
    });
    let shape: dcc_program::Shape = dims.collect::<Option<_>>()?;
    let count = shape.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim)).filter(|&count| count <= 64)?;
    let values = (0..count).flat_map(|_| random.number().to_le_bytes().into_iter().take(dtype.bytes() as usize));
    let data = TensorData::Owned(values.collect::<Vec<u8>>().into());
    Some(import::Tensor { name: name.to_owned(), dtype, shape, data })
}

/// Whether programs for some mesh come of it.
pub fn compile(bytes: Vec<u8>, random: &mut Random) -> bool {
    let Ok(model) = Model::decode(Bytes::from(bytes)) else { return false };
    let options = compiled_as(&model, random);
    match dcc::compile::compile(&model, &options) {
        Ok(_) => true,
        Err(error) => {
            assert!([2, 3, 4].contains(&error.code.exit()), "{error}");
            false
        }
    }
}

fn compiled_as(model: &Model, random: &mut Random) -> dcc::compile::Options {
    let import = options(model, random);
    let two = |random: &mut Random| 1 + random.below(2) as u32;
    let parallel = Parallel { dp: two(random), tp: two(random), pp: two(random), ..Parallel::default() };
    let accumulate = [None, Some(1), Some(2)][random.below(3)];
    let batch = batch::Given { global: import.global_batch.map(|batch| 4 * batch), accumulate, ..batch::Given::default() };
    let kind = [LossKind::Output, LossKind::Mse, LossKind::Auto, LossKind::CrossEntropy][random.below(4)];
    let mut optimizer = OptimizerOptions::default();
    if random.below(2) == 0 {
        optimizer.optimizer = Optimizer::Sgd { momentum: 0.9, nesterov: true };
        optimizer.grad_clip = Some(1.0);
    }
    dcc::compile::Options {
        name: "model.onnx".to_owned(),
        import,
        batch,
        parallel,
        batch_norm: [BatchNorm::Batch { groups: 1 }, BatchNorm::Local, BatchNorm::Frozen][random.below(3)],
        dtype: [None, Some(DType::F64)][random.below(2)],
        training: TrainingOptions {
            loss: LossOptions { kind, ..LossOptions::default() },
            optimizer,
            ..TrainingOptions::default()
        },
        ..dcc::compile::Options::default()
    }
}

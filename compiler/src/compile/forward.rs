//! Evaluation: a model's outputs, or a loss and its gradients, computed on one device by the lowering and kernels of training.

use super::{Options, checked, inputs, programs, simplify, tensors};
use crate::error::{Error, Result};
use crate::graph::{self, Graph, NodeId, Phase};
use crate::import::{self, Model, OutputInfo};
use crate::ops::Op;
use crate::plan::{self, Parallel};
use crate::train::{Trainable, TrainingOptions, for_evaluation, gradient_step};
use crate::{place, schedule};
use dcc_program::DType;
use dcc_program::artifact::{Artifact, Tensor};
use dcc_program::kernel::BinaryOp;
use dcc_program::manifest::{self, Manifest};
use dcc_program::program::{Mode, Program};
use std::collections::BTreeMap;

/// A model, at fixed sizes, as evaluation has it.
#[derive(Clone, Debug)]
pub struct Subject {
    pub name: String,
    /// The forward graph: no dropout, running statistics.
    pub graph: Graph,
    /// Where the values of its parameters are.
    pub tensors: Vec<Tensor>,
    pub parameters: BTreeMap<String, manifest::Parameter>,
    /// Outputs that one of ONNX's loss operators computes.
    pub loss_outputs: Vec<String>,
    /// Outputs without elements, which no program gives, by their place among all.
    pub empty_outputs: Vec<(usize, OutputInfo)>,
}

/// A graph to evaluate, and the program that does.
#[derive(Clone, Debug)]
pub struct Evaluation {
    /// As it was imported.
    pub source: Graph,
    /// Simplified: what the programs compute.
    pub graph: Graph,
    pub programs: Vec<Program>,
    pub inputs: BTreeMap<String, manifest::Input>,
}

impl Subject {
    /// The model at the sizes of `options`. Errors: as of `compile`'s import.
    pub fn of_model(model: &Model, options: &Options) -> Result<Subject> {
        let mut import_options = options.import.clone();
        import_options.global_batch = options.batch.global;
        let mut imported = import::onnx(model, &import_options)?;
        if let Some(dtype) = options.dtype {
            imported.graph = crate::precision::retype(&imported.graph, dtype)?;
        }
        let mut graph = for_evaluation(&imported.graph)?;
        if let Some(mixed) = options.training.mixed {
            // Attention is found in one precision.
            graph = crate::precision::narrow(&simplify(&graph, options)?, mixed.half)?;
        }
        let parameter = |p: &import::Parameter| (p.tensor.name.clone(), p.entry(p.trained));
        Ok(Subject {
            name: options.name.clone(),
            graph,
            tensors: tensors(model, &imported, options)?,
            parameters: imported.parameters.iter().map(parameter).collect(),
            empty_outputs: imported.outputs.iter().cloned().enumerate().filter(|(_, o)| o.shape.contains(&0)).collect(),
            loss_outputs: imported.outputs.iter().filter(|o| o.is_loss).map(|o| o.name.clone()).collect(),
        })
    }

    /// What an artifact or a checkpoint keeps of its model: `text` is that of the forward graph. Errors: it is no such text.
    pub fn of_text(
        name: &str,
        text: &str,
        tensors: Vec<Tensor>,
        parameters: BTreeMap<String, manifest::Parameter>,
    ) -> Result<Subject> {
        let parsed = Graph::parse(text).map_err(|what| Error::internal(format!("the forward graph is malformed: {what}")))?;
        graph::verify(&parsed)?;
        let graph = for_evaluation(&parsed)?;
        Ok(Subject { name: name.to_owned(), graph, tensors, parameters, loss_outputs: Vec::new(), empty_outputs: Vec::new() })
    }

    /// The model's outputs.
    pub fn outputs(&self) -> Result<Evaluation> {
        self.evaluation(&self.graph)
    }

    /// The loss that `options` ask for and its gradients: outputs as of [`gradient_step`].
    pub fn gradients(&self, options: &TrainingOptions) -> Result<Evaluation> {
        let mut options = options.clone();
        options.loss.loss_outputs.clone_from(&self.loss_outputs);
        let trainable: Vec<Trainable> = self
            .parameters
            .iter()
            .map(|(name, p)| Trainable { name: name.clone(), aliases: p.other_names(), by_default: p.trained })
            .collect();
        let (graph, classes) = gradient_step(&self.graph, &trainable, &options)?;
        let mut evaluation = self.evaluation(&graph)?;
        evaluation.inputs = inputs::of_loss(&[&evaluation.source], &classes, options.loss.ignore_index);
        Ok(evaluation)
    }

    fn evaluation(&self, graph: &Graph) -> Result<Evaluation> {
        let options = Options { name: self.name.clone(), ..Options::default() };
        let source = graph.clone();
        let graph = with_computed_outputs(simplify(graph, &options)?)?;
        super::has_elements(&graph).map_err(|error| error.help("compiled kernels need some; use --backend interp"))?;
        let mut plan = plan::choose(&graph, &Parallel::default())?;
        // The one stage, also for what depends on no input that counts samples.
        let computed = |id: &NodeId| graph[*id].phase == Phase::Forward && !graph[*id].operands.is_empty();
        plan.stages.extend(graph.ids().filter(computed).map(|id| (id, 0)));
        let placed = place::place(&graph, &plan)?;
        let programs = programs(&placed, &plan, &schedule::order(&plan), &options, Mode::Eval, &[]).and_then(checked)?;
        Ok(Evaluation { inputs: inputs::of_graphs(&[&source]), source, graph, programs })
    }

    /// The artifact that holds the programs of `evaluation` and the values of its parameters.
    pub fn artifact(&self, evaluation: &Evaluation) -> Artifact {
        let manifest = Manifest {
            model: self.name.clone(),
            parameters: self.parameters.clone(),
            inputs: evaluation.inputs.clone(),
            ..Manifest::default()
        };
        let (eval, tensors, options) = (evaluation.programs.clone(), self.tensors.clone(), manifest.to_options());
        Artifact { eval, tensors, options, ..Artifact::default() }
    }
}

/// Outputs that are inputs or parameters as copies of them: a program writes its outputs itself.
fn with_computed_outputs(mut graph: Graph) -> Result<Graph> {
    for at in 0..graph.outputs.len() {
        let mut id = graph.outputs[at].1;
        while matches!(graph[id].op, Op::StopGradient(_) | Op::GradSum(_)) && graph[id].operands.len() == 1 {
            id = graph[id].operands[0];
        }
        if matches!(graph[id].op, Op::Input(_) | Op::Param(_)) {
            let op = if graph.ty(id).dtype == DType::Bool { BinaryOp::Or } else { BinaryOp::Max };
            graph.outputs[at].1 = graph.binary(op, id, id)?;
        }
    }
    Ok(graph)
}

# Models whose kernels for GPUs are checked, a line each with the flags of `dcc compile`. For nvrtc.sh and emulated.sh to read.

# One export of each sample and family; those of a size that only a GPU runs are `large`.
every_model() {
    local path model
    for path in tests/models/*.onnx tests/models/families/*.onnx; do
        model=${path#tests/models/}
        model=${model%.onnx}
        case $model in
        *_legacy* | *_optimized | *_opset* | *_shuffled | gpt3_175b) ;;
        gpt2_124m | gpt2_50257) [ "${1:-}" != large ] || echo "$model --global-batch-size 4 --dtype bf16" ;;
        families/static_lstm) echo "$model --optimizer adamw" ;;
        families/unet) echo "$model --global-batch-size 4 --loss cross-entropy --dtype f16" ;;
        static_*) echo "$model --optimizer adamw --grad-clip 1" ;;
        *)
            echo "$model --global-batch-size 4 --optimizer adamw --grad-clip 1"
            echo "$model --global-batch-size 4 --dtype bf16"
            ;;
        esac
    done
}

# A few, with meshes and optimizers of their own.
some_models() {
    cat <<'MODELS'
gpt2_124m --global-batch-size 4 --optimizer adamw --grad-clip 1
gpt2_124m --global-batch-size 4 --dtype bf16
gpt2_tiny --global-batch-size 4 --dtype bf16 --param-dtype bf16 --optimizer adamw
bert_tiny --pp 2 --grad-accum 2 --global-batch-size 8 --optimizer lamb
cnn --global-batch-size 4 --dtype f16 --optimizer adafactor
families/moe --ep 2 --global-batch-size 4
static_mixer --dtype f64 --optimizer muon
MODELS
}

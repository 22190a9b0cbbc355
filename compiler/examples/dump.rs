use dcc::import::*;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let m = Model::decode(std::fs::read(&a[1]).unwrap().into()).unwrap();
    let i = match onnx(&m, &Options { global_batch: Some(a.get(2).map_or(8, |s| s.parse().unwrap())), ..Default::default() }) {
        Ok(i) => i,
        Err(e) => {
            println!("{e}");
            return;
        }
    };
    let g = &i.graph;
    for id in g.ids() {
        let n = &g[id];
        println!(
            "%{} = {}{} {:?} : {}{:?}   # {}",
            id.0,
            n.op.name(),
            n.op.attributes(),
            n.operands.iter().map(|o| o.0).collect::<Vec<_>>(),
            n.ty.dtype.name(),
            n.ty.shape.as_slice(),
            g.origin(id)
        );
    }
    for p in &i.parameters {
        if !p.aliases.is_empty() || !p.trained || p.gain {
            println!("{} trained {} gain {} {:?}", p.tensor.name, p.trained, p.gain, p.aliases);
        }
    }
    println!("{:?}", i.warnings);
}

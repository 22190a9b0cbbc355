//! Protobuf without its schema: fields of a message, changed one by one.

use super::mutate::Random;

/// Messages inside of messages that are looked into.
const DEPTH: usize = 10;
/// Numbers at which dims, counts and codes change their meaning.
pub const NUMBERS: [i64; 18] = [
    0,
    1,
    2,
    3,
    -1,
    -2,
    7,
    16,
    255,
    65_536,
    i32::MAX as i64,
    i32::MIN as i64,
    1 << 31,
    1 << 33,
    1 << 62,
    i64::MAX,
    i64::MIN,
    -100,
];

#[derive(Clone)]
struct Field {
    tag: u64,
    payload: Payload,
}

#[derive(Clone)]
enum Payload {
    Number(u64),
    Fixed(Vec<u8>),
    Bytes(Vec<u8>),
}

fn varint(bytes: &[u8], at: &mut usize) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = *bytes.get(*at)?;
        *at += 1;
        value |= u64::from(byte & 127) << shift;
        if byte < 128 {
            return Some(value);
        }
    }
    None
}

fn parse(bytes: &[u8]) -> Option<Vec<Field>> {
    let (mut at, mut fields) = (0, Vec::new());
    while at < bytes.len() {
        let key = varint(bytes, &mut at)?;
        let width = match key & 7 {
            0 => {
                fields.push(Field { tag: key, payload: Payload::Number(varint(bytes, &mut at)?) });
                continue;
            }
            1 => 8,
            5 => 4,
            2 => usize::try_from(varint(bytes, &mut at)?).ok()?,
            _ => return None,
        };
        let content = bytes.get(at..at.checked_add(width)?)?.to_vec();
        at += width;
        let payload = if key & 7 == 2 { Payload::Bytes(content) } else { Payload::Fixed(content) };
        fields.push(Field { tag: key, payload });
    }
    Some(fields)
}

fn put(mut value: u64, out: &mut Vec<u8>) {
    while value > 127 {
        out.push(value as u8 | 128);
        value >>= 7;
    }
    out.push(value as u8);
}

/// `wrong` is the field whose length is another than its content's.
fn print(fields: &[Field], wrong: Option<(usize, u64)>) -> Vec<u8> {
    let mut out = Vec::new();
    for (position, field) in fields.iter().enumerate() {
        put(field.tag, &mut out);
        match &field.payload {
            Payload::Number(value) => put(*value, &mut out),
            Payload::Fixed(bytes) => out.extend(bytes),
            Payload::Bytes(bytes) => {
                put(wrong.filter(|wrong| wrong.0 == position).map_or(bytes.len() as u64, |wrong| wrong.1), &mut out);
                out.extend(bytes);
            }
        }
    }
    out
}

/// One change to a field anywhere in `message`; `donor` is another message, whose fields may come in.
pub fn changed(message: &[u8], donor: &[u8], random: &mut Random) -> Vec<u8> {
    at_depth(message, donor, random, 0)
}

fn at_depth(message: &[u8], donor: &[u8], random: &mut Random, depth: usize) -> Vec<u8> {
    let Some(mut fields) = parse(message).filter(|fields| !fields.is_empty()) else { return message.to_vec() };
    // Half of the time the largest, which is where the graph is.
    let size = |field: &Field| if let Payload::Bytes(bytes) = &field.payload { bytes.len() } else { 0 };
    let largest = (0..fields.len()).max_by_key(|&at| size(&fields[at])).expect("there is one");
    let at = if depth < 2 && random.below(2) == 0 { largest } else { random.below(fields.len()) };
    if let Payload::Bytes(bytes) = &fields[at].payload
        && depth < DEPTH
        && random.below(5) > 0
        && parse(bytes).is_some_and(|inner| !inner.is_empty())
    {
        let tag = fields[at].tag;
        let other = parse(donor).and_then(|fields| fields.into_iter().find(|field| field.tag == tag));
        let donor =
            other.map_or(Vec::new(), |field| if let Payload::Bytes(bytes) = field.payload { bytes } else { Vec::new() });
        let inner = at_depth(bytes, &donor, random, depth + 1);
        fields[at].payload = Payload::Bytes(inner);
        return print(&fields, None);
    }
    edit(&mut fields, at, donor, random)
}

fn edit(fields: &mut Vec<Field>, at: usize, donor: &[u8], random: &mut Random) -> Vec<u8> {
    match random.below(9) {
        0 => drop(fields.remove(at)),
        1 => fields.insert(at, fields[at].clone()),
        2 => {
            let other = random.below(fields.len());
            fields.swap(at, other);
        }
        // The same content as another field.
        3 => fields[at].tag = fields[at].tag & 7 | (1 + random.below(20) as u64) << 3,
        4 => {
            let given = parse(donor).unwrap_or_default();
            if !given.is_empty() {
                fields.insert(at, given[random.below(given.len())].clone());
            }
        }
        5 => {
            let length = [0, 1, u64::MAX, 1 << 31, random.below(1000) as u64][random.below(5)];
            return print(fields, Some((at, length)));
        }
        6 => {
            let other = random.below(fields.len());
            fields[at].payload = fields[other].payload.clone();
        }
        _ => value(&mut fields[at].payload, random),
    }
    print(fields, None)
}

fn value(payload: &mut Payload, random: &mut Random) {
    match payload {
        Payload::Number(value) => *value = NUMBERS[random.below(NUMBERS.len())] as u64,
        Payload::Fixed(bytes) => bytes.iter_mut().for_each(|byte| *byte = random.below(256) as u8),
        Payload::Bytes(bytes) if bytes.is_empty() => bytes.push(random.below(256) as u8),
        Payload::Bytes(bytes) => match random.below(4) {
            0 => bytes.clear(),
            1 => bytes.truncate(random.below(bytes.len())),
            2 => bytes.extend(bytes.clone()),
            _ => {
                let at = random.below(bytes.len());
                bytes[at] = random.below(256) as u8;
            }
        },
    }
}

//! Plans of library operations: one for all calls of the same sizes and strides, of which a deep network has many.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

/// By type, the plans that there are.
#[derive(Default)]
pub(super) struct Plans(HashMap<TypeId, Box<dyn Any>>);

impl Plans {
    /// The plan of what `of` describes, made by `plan` if there is none yet.
    pub fn get<D: Clone + Eq + Hash + 'static, P: 'static>(&mut self, of: &D, plan: impl FnOnce(&D) -> P) -> Arc<P> {
        let all = self.0.entry(TypeId::of::<(D, P)>()).or_insert_with(|| Box::new(HashMap::<D, Arc<P>>::new()));
        let all = all.downcast_mut::<HashMap<D, Arc<P>>>().expect("the key is the types'");
        match all.get(of) {
            Some(known) => Arc::clone(known),
            None => Arc::clone(all.entry(of.clone()).or_insert(Arc::new(plan(of)))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_descriptions_share_a_plan() {
        let mut plans = Plans::default();
        let mut made = 0;
        let mut get = |size: usize| {
            plans.get(&vec![size], |sizes| {
                made += 1;
                sizes[0] * 2
            })
        };
        let (a, b, c) = (get(3), get(4), get(3));
        assert_eq!((*a, *b, *c, made), (6, 8, 6, 2));
        assert!(Arc::ptr_eq(&a, &c) && !Arc::ptr_eq(&a, &b));
        let other: Arc<String> = plans.get(&vec![3_usize], |sizes| format!("{sizes:?}"));
        assert_eq!(*other, "[3]", "another type of plan for the same description");
    }
}

//! Health, waiting for it, and forming anew.

use std::sync::atomic::{AtomicU32, Ordering};
use std::{
    sync::Arc,
    task::{Wake, Waker},
    time::Duration,
};

use warpweft_bootstrap::{Group, GroupError, Health, Loss, Rank, ReformConfig};

use crate::{SOON, config, each, groups, in_threads};

#[test]
fn changes_are_told_in_order_and_once() {
    let mut groups = groups(4);
    let mut watch = groups[1].watch();
    assert!(watch.next(Duration::ZERO).unwrap().is_none());
    drop(groups.remove(3));
    let change = watch.next(SOON).unwrap().unwrap();
    assert_eq!((change.rank, change.health), (Rank(3), Health::Lost(Loss::Left)));
    drop(groups.remove(2));
    assert_eq!(watch.next(SOON).unwrap().unwrap().rank, Rank(2));
    assert!(watch.next(Duration::ZERO).unwrap().is_none());
    let health = groups[0].wait_health(SOON, |health| !health[2].is_present()).unwrap();
    assert_eq!(health[..2], [Health::Alive; 2]);
    assert!(matches!(groups[0].check(), Err(GroupError::PeerLost { .. })));
}

#[derive(Default)]
struct Count(AtomicU32);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        // Release pairs with the acquire below; nothing else is passed.
        self.0.fetch_add(1, Ordering::Release);
    }
}

#[test]
fn a_waker_is_woken_by_a_change() {
    let mut groups = groups(2);
    let count = Arc::new(Count::default());
    groups[0].wake_on_change(&Waker::from(Arc::clone(&count)));
    drop(groups.remove(1));
    groups[0].wait_health(SOON, |health| !health[1].is_present()).unwrap();
    while count.0.load(Ordering::Acquire) == 0 {
        std::thread::yield_now();
    }
}

#[test]
fn survivors_form_anew_and_keep_their_order() {
    for leaver in 0..4_usize {
        let mut groups = groups(4);
        drop(groups.remove(leaver));
        let wait = |group: &Group| group.wait_health(SOON, |health| !health[leaver].is_present()).unwrap();
        each(&groups, wait);
        let reformed = each(&groups, |group| group.reform(SOON).unwrap());
        drop(groups);
        for (reformed, new) in reformed.iter().zip(0..) {
            assert_eq!((reformed.group.rank(), reformed.group.size()), (Rank(new), 3));
            assert_eq!(reformed.group.epoch(), 1);
            assert_eq!(reformed.ranks[leaver], None);
            let kept: Vec<u32> = reformed.ranks.iter().flatten().map(|rank| rank.0).collect();
            assert_eq!(kept, [0, 1, 2]);
        }
        let again: Vec<Group> = reformed.into_iter().map(|reformed| reformed.group).collect();
        each(&again, |group| group.barrier("anew", SOON).unwrap());
    }
}

#[test]
fn a_group_forms_anew_until_one_is_left() {
    let mut groups = groups(4);
    for size in (1..4).rev() {
        drop(groups.remove(0));
        each(&groups, |group| group.wait_health(SOON, |health| !health[0].is_present()).unwrap());
        let reformed = each(&groups, |group| group.reform(SOON).unwrap().group);
        groups = reformed;
        assert!(groups.iter().all(|group| group.size() == size));
        each(&groups, |group| group.barrier("anew", SOON).unwrap());
    }
}

#[test]
fn a_process_that_was_not_there_joins_when_the_group_forms_anew() {
    let mut groups = groups(3);
    drop(groups.remove(2));
    each(&groups, |group| group.wait_health(SOON, |health| !health[2].is_present()).unwrap());
    let successor = groups[1].successor().unwrap();
    let anew = ReformConfig { newcomers: 1, ..ReformConfig::default() };
    let reformed = in_threads(3, |number| match number {
        2 => Group::rejoin(&successor, config(0, 1), SOON).unwrap(),
        _ => groups[number as usize].reform_with(&anew, SOON).unwrap().group,
    });
    assert_eq!(reformed[2].rank(), Rank(2));
    let previous: Vec<Option<Rank>> = reformed[0].members().iter().map(|member| member.previous).collect();
    assert_eq!(previous, [Some(Rank(0)), Some(Rank(1)), None]);
    each(&reformed, |group| group.barrier("anew", SOON).unwrap());
}

#[test]
fn who_does_not_come_in_time_is_left_out() {
    let groups = groups(3);
    let reformed = each(&groups[..2], |group| group.reform(Duration::from_millis(600)).unwrap());
    for reformed in &reformed {
        assert_eq!(reformed.ranks, [Some(Rank(0)), Some(Rank(1)), None]);
    }
    let without = ReformConfig { without: vec![Rank(0)], ..ReformConfig::default() };
    let alone = groups[2].reform_with(&without, Duration::from_millis(300)).err();
    // Rank 1 listens for a group that has formed already, and says so or does not answer.
    assert!(alone.is_some());
}

#[test]
fn an_aborted_group_forms_anew_with_all() {
    let groups = groups(3);
    groups[1].abort("again from the start").unwrap();
    each(&groups, |group| assert!(matches!(group.barrier("x", SOON), Err(GroupError::Aborted { .. }))));
    let reformed = each(&groups, |group| group.reform(SOON).unwrap().group);
    each(&reformed, |group| group.barrier("anew", SOON).unwrap());
}

//! Tests of the state machine on a virtual clock.

use super::*;

const START: Moment = Duration::from_secs(1_800_000_000);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);
const BUDGET: Duration = Duration::from_secs(18);

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn refused(message: &str) -> Failure {
    Failure::Denied(Refusal { code: Some("no_such_pod".to_owned()), message: message.to_owned() })
}

fn unavailable() -> Failure {
    Failure::Unavailable("connection refused".to_owned())
}

/// A life cycle and two clocks that only the test advances.
struct Pod {
    life: LifeCycle,
    now: Now,
}

impl Pod {
    fn new(start: Start, seed: u64) -> Self {
        let now = Now { uptime: seconds(77), wall: START };
        Self { life: LifeCycle::new(start, now, seed), now }
    }

    /// A pod with a certificate that is valid for a day.
    fn running(seed: u64) -> Self {
        let mut pod = Self::new(Start::Within(BUDGET), seed);
        assert!(pod.asks());
        assert_eq!(pod.issued(DAY), Install::Open);
        pod
    }

    fn poll(&mut self) -> Option<Step> {
        self.life.poll(self.now)
    }

    fn asks(&mut self) -> bool {
        matches!(self.poll(), Some(Step::Ask { .. }))
    }

    fn pass(&mut self, time: Duration) {
        self.now.uptime += time;
        self.now.wall += time;
    }

    fn age(&self) -> Duration {
        self.now.uptime - seconds(77)
    }

    fn issued(&mut self, life: Duration) -> Install {
        self.life.issued(self.now, self.now.wall + life)
    }

    fn failed(&mut self, denied: bool) {
        let failure = if denied { refused("unknown pod") } else { unavailable() };
        self.life.failed(self.now, failure);
    }

    /// Advances the clocks until there is something to do.
    fn next(&mut self) -> Step {
        for _ in 0..3 {
            if let Some(step) = self.poll() {
                return step;
            }
            self.pass(self.life.idle(self.now).expect("something is due some day"));
        }
        panic!("idle says now, poll says nothing: {:?} at {:?}", self.life, self.now);
    }

    /// Advances to the next request, which must be the next step.
    fn next_ask(&mut self) -> Duration {
        let before = self.now.uptime;
        let step = self.next();
        assert!(matches!(step, Step::Ask { .. }), "{step:?}");
        self.now.uptime - before
    }
}

#[test]
fn a_new_pod_asks_once_and_waits_for_the_answer() {
    let mut pod = Pod::new(Start::Within(BUDGET), 1);
    assert!(pod.asks());
    pod.pass(seconds(5));
    assert_eq!(pod.poll(), None);
    assert!(!pod.life.is_open());
    assert_eq!(pod.issued(DAY), Install::Open);
    assert!(pod.life.is_open());
}

#[test]
fn renewal_starts_when_about_a_third_of_the_life_is_left_and_is_spread() {
    let mut moments = std::collections::BTreeSet::new();
    for seed in 0..50 {
        let at = Pod::running(seed).next_ask();
        assert!(at <= DAY * 2 / 3, "{at:?}");
        assert!(at >= DAY * 2 / 3 - DAY / 12, "{at:?}");
        moments.insert(at);
    }
    assert!(moments.len() > 40, "pods would renew together");
}

#[test]
fn a_renewed_certificate_is_swapped_in_while_open() {
    let mut pod = Pod::running(3);
    pod.next_ask();
    assert_eq!(pod.issued(DAY), Install::Swap);
    assert!(pod.next_ask() > DAY / 2);
}

#[test]
fn a_pod_lives_for_a_year_on_certificates_of_a_day_and_is_never_closed() {
    let mut pod = Pod::running(9);
    let mut renewals = 0;
    while pod.age() < DAY * 365 {
        pod.next_ask();
        pod.pass(Duration::from_millis(50));
        assert_eq!(pod.issued(DAY), Install::Swap);
        renewals += 1;
    }
    assert!((545..640).contains(&renewals), "{renewals} renewals");
}

#[test]
fn a_ca_that_is_down_for_hours_is_asked_patiently_and_the_path_stays_open() {
    let mut pod = Pod::running(5);
    pod.next_ask();
    let (down, mut tries) = (pod.now.uptime, 0);
    while pod.now.uptime < down + HOUR * 6 {
        pod.failed(false);
        assert!(pod.next_ask() <= MAX_RENEWAL_WAIT * 5 / 4);
        assert!(pod.life.is_open());
        tries += 1;
    }
    assert!((60..120).contains(&tries), "{tries} tries in six hours");
    assert_eq!(pod.issued(DAY), Install::Swap);
}

#[test]
fn expiry_closes_the_path_once_and_a_later_certificate_opens_it_again() {
    let mut pod = Pod::running(4);
    pod.next_ask();
    pod.failed(true);
    let mut tries = 0;
    loop {
        match pod.next() {
            Step::Ask { .. } => {
                tries += 1;
                pod.failed(false);
            }
            step => {
                assert_eq!(step, Step::Close(Closing::Expired));
                break;
            }
        }
    }
    assert_eq!(pod.age(), DAY);
    assert!((5..200).contains(&tries), "{tries} tries");
    assert!(!pod.life.is_open());
    assert!(pod.next_ask() < seconds(60));
    assert_eq!(pod.issued(DAY), Install::Open);
}

#[test]
fn expiry_during_a_request_still_closes_the_path() {
    let mut pod = Pod::running(4);
    pod.next_ask();
    assert_eq!(pod.next(), Step::Close(Closing::Expired));
    assert_eq!(pod.age(), DAY);
    assert_eq!(pod.poll(), None);
    assert_eq!(pod.issued(DAY), Install::Open, "the late answer is as good");
}

#[test]
fn a_clock_set_forward_past_the_end_closes_the_path_and_asks_at_once() {
    let mut pod = Pod::running(6);
    pod.pass(HOUR);
    pod.now.wall += DAY * 30;
    assert_eq!(pod.poll(), Some(Step::Close(Closing::Expired)));
    assert!(pod.asks());
    assert_eq!(pod.issued(DAY), Install::Open);
}

#[test]
fn a_clock_set_forward_into_the_last_third_renews_at_once() {
    let mut pod = Pod::running(6);
    pod.now.wall += HOUR * 20;
    assert!(pod.asks());
    pod.failed(false);
    assert_eq!(pod.poll(), None, "and then waits as after any failure");
    assert!(pod.next_ask() > seconds(60));
}

#[test]
fn a_clock_set_back_does_not_put_off_the_renewal() {
    let mut pod = Pod::running(7);
    pod.pass(HOUR);
    pod.now.wall -= DAY * 365;
    assert!(pod.next_ask() <= HOUR * 15);
    pod.failed(false);
    assert!(pod.next_ask() <= MAX_RENEWAL_WAIT * 5 / 4);
    assert_eq!(pod.issued(DAY), Install::Swap);
    assert!(pod.next_ask() <= DAY);
}

#[test]
fn a_clock_set_during_the_start_does_not_change_the_budget() {
    for step in [DAY, Duration::ZERO] {
        let mut pod = Pod::new(Start::Within(BUDGET), 1);
        assert!(pod.asks());
        pod.now.wall = START - DAY + step * 2;
        assert_eq!(pod.poll(), None);
        assert!(matches!(pod.next(), Step::GiveUp(Failure::Unavailable(_))));
        assert_eq!(pod.age(), BUDGET);
    }
}

#[test]
fn pods_of_a_ca_that_is_no_longer_trusted_ask_for_another_certificate_soon_but_not_together() {
    let mut moments = std::collections::BTreeSet::new();
    for seed in 0..50 {
        let mut pod = Pod::running(seed);
        pod.pass(HOUR);
        pod.life.judged(pod.now, Standing::Orphaned);
        assert!(pod.life.is_open(), "peers that have not heard of it still accept");
        let wait = pod.next_ask();
        assert!(wait <= MAX_DELAY_AFTER_TRUST_CHANGE, "{wait:?}");
        moments.insert(wait);
        pod.life.judged(pod.now, Standing::Orphaned);
        assert_eq!(pod.poll(), None, "one request at a time");
        assert_eq!(pod.issued(DAY), Install::Swap);
    }
    assert!(moments.len() > 40, "pods would ask together");
}

#[test]
fn a_bundle_with_one_more_ca_changes_nothing() {
    let mut pod = Pod::running(8);
    pod.pass(HOUR);
    pod.life.judged(pod.now, Standing::Good);
    assert!(pod.next_ask() > HOUR * 12);
}

#[test]
fn a_revoked_certificate_closes_the_path_once_and_another_one_opens_it() {
    let mut pod = Pod::running(10);
    pod.pass(HOUR);
    pod.life.judged(pod.now, Standing::Revoked);
    assert_eq!(pod.life.idle(pod.now), Some(Duration::ZERO));
    assert_eq!(pod.poll(), Some(Step::Close(Closing::Revoked)));
    assert!(!pod.life.is_open());
    assert!(pod.next_ask() <= MAX_DELAY_AFTER_TRUST_CHANGE);
    pod.failed(true);
    pod.life.judged(pod.now, Standing::Revoked);
    assert_eq!(pod.poll(), None, "said once");
    let wait = pod.next_ask();
    assert!((MAX_BACKOFF_LAZY / 2..MAX_BACKOFF_LAZY * 2).contains(&wait), "{wait:?}");
    assert_eq!(pod.issued(DAY), Install::Open);
}

#[test]
fn a_certificate_revoked_during_its_renewal_closes_the_path_until_the_answer() {
    let mut pod = Pod::running(11);
    pod.next_ask();
    pod.life.judged(pod.now, Standing::Revoked);
    assert_eq!(pod.poll(), Some(Step::Close(Closing::Revoked)));
    assert_eq!(pod.poll(), None);
    assert_eq!(pod.issued(DAY), Install::Open);
    assert_eq!(pod.poll(), None);
}

#[test]
fn a_strict_start_ends_at_once_when_denied() {
    let mut pod = Pod::new(Start::Within(BUDGET), 1);
    assert!(pod.asks());
    pod.failed(true);
    assert_eq!(pod.poll(), Some(Step::GiveUp(refused("unknown pod"))));
}

#[test]
fn a_strict_start_retries_until_its_budget_and_then_says_why() {
    let mut pod = Pod::new(Start::Within(BUDGET), 1);
    let mut tries = 0;
    loop {
        match pod.next() {
            Step::Ask { within } => {
                tries += 1;
                assert!(pod.age() + within <= BUDGET + Duration::from_millis(200));
                pod.failed(false);
            }
            step => {
                assert_eq!(step, Step::GiveUp(unavailable()));
                break;
            }
        }
    }
    assert_eq!(pod.age(), BUDGET);
    assert!((8..40).contains(&tries), "{tries} tries");
}

#[test]
fn a_request_that_never_ends_does_not_outlast_the_budget() {
    let mut pod = Pod::new(Start::Within(BUDGET), 1);
    assert!(pod.asks());
    assert!(matches!(pod.next(), Step::GiveUp(Failure::Unavailable(_))));
    assert_eq!(pod.age(), BUDGET);
}

#[test]
fn a_pod_that_nobody_waits_for_never_gives_up() {
    let mut pod = Pod::new(Start::Whenever, 1);
    assert!(pod.asks());
    for n in 0..500 {
        pod.failed(n % 2 == 0);
        assert!(pod.next_ask() <= MAX_BACKOFF_LAZY * 5 / 4);
    }
    assert_eq!(pod.issued(DAY), Install::Open);
}

#[test]
fn an_init_container_that_is_not_there_yet_is_looked_for_ever_more_rarely_and_never_given_up() {
    let mut pod = Pod::new(Start::Whenever, 1);
    assert!(pod.asks());
    let mut looks = 0;
    while pod.age() < seconds(300) {
        pod.life.not_yet(pod.now);
        let wait = pod.next_ask();
        assert!((FIRST_BACKOFF..=MAX_BACKOFF_STRICT).contains(&wait), "{wait:?}");
        looks += 1;
    }
    assert!((150..300).contains(&looks), "{looks} looks in five minutes");
    pod.failed(false);
    assert!(pod.next_ask() <= FIRST_BACKOFF * 2, "a failure after that is the first");
}

#[test]
fn a_certificate_that_lives_for_seconds_does_not_cause_a_storm() {
    let mut pod = Pod::new(Start::Within(BUDGET), 1);
    assert!(pod.asks());
    let _ = pod.issued(seconds(1));
    assert!(pod.poll().is_none());
    pod.pass(Duration::from_millis(999));
    assert!(pod.poll().is_none());
}

#[test]
fn with_a_provisional_certificate_a_pod_is_open_and_goes_on_asking_as_one_that_has_none() {
    let mut pod = Pod::new(Start::Whenever, 3);
    assert!(pod.asks());
    assert_eq!(pod.life.issued_provisionally(pod.now, pod.now.wall + seconds(600)), Install::Open);
    for _ in 0..20 {
        assert!(pod.next_ask() <= seconds(2));
        pod.life.not_yet(pod.now);
    }
    // The proof is there but the CA is not: retries are as frequent as without any certificate.
    pod.next_ask();
    pod.failed(false);
    assert!(pod.next_ask() <= FIRST_BACKOFF * 5 / 4);
    assert_eq!(pod.issued(DAY), Install::Swap);
    assert!(pod.next_ask() > DAY / 2);
}

#[test]
fn a_pod_whose_provisional_certificate_ends_is_closed_and_asks_on() {
    let mut pod = Pod::new(Start::Whenever, 4);
    assert!(pod.asks());
    assert_eq!(pod.life.issued_provisionally(pod.now, pod.now.wall + seconds(30)), Install::Open);
    let closed = loop {
        match pod.next() {
            Step::Ask { .. } => pod.life.not_yet(pod.now),
            step => break step,
        }
    };
    assert_eq!((closed, pod.age()), (Step::Close(Closing::Expired), seconds(30)));
    pod.next_ask();
    assert_eq!(pod.issued(DAY), Install::Open);
}

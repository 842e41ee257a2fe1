package admission

import (
	"math/rand/v2"
	"time"
)

// Budget bounds how many attempts may be made again, so that an overload does not multiply: a share of the requests
// that come, and a few in any case. It is not safe for concurrent use.
type Budget struct {
	Share float64 // retries for each request that comes; 0: only the few

	level float64
	at    time.Time
}

// The few retries that are possible without requests, at once and in each second.
const (
	budgetSize      = 100
	budgetPerSecond = 10
)

func (b *Budget) refill(now time.Time) {
	if b.at.IsZero() {
		b.level, b.at = budgetSize, now
	}
	if passed := now.Sub(b.at); passed > 0 {
		b.level += passed.Seconds() * budgetPerSecond
		b.at = now
	}
	b.level = min(b.level, budgetSize)
}

// Request takes note of a request that came.
func (b *Budget) Request(now time.Time) {
	b.refill(now)
	b.level = min(b.level+b.Share, budgetSize)
}

// Retry takes one retry out of the budget and reports whether there was one.
func (b *Budget) Retry(now time.Time) bool {
	b.refill(now)
	if b.level < 1 {
		return false
	}
	b.level--
	return true
}

// Backoff is how long to wait before a retry: a random part of first, doubled with each retry before it up to most.
// The first retry has number 0.
func Backoff(retry int, first, most time.Duration) time.Duration {
	limit := first
	for range retry {
		if limit *= 2; limit >= most {
			break
		}
	}
	limit = min(limit, most)
	if limit <= 0 {
		return 0
	}
	return limit/2 + rand.N(limit/2+1)
}

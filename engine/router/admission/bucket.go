package admission

import "time"

// bucket counts what a client may still use of something. Its zero value is full once it was refilled.
type bucket struct {
	level float64 // below 0 where something cost more than was estimated
	size  float64 // what fits: that of a minute; 0: no limit
	at    time.Time
}

// refill adds what has come since the last time. perMinute may change.
func (b *bucket) refill(now time.Time, perMinute int) {
	size := float64(perMinute)
	if b.size == 0 { // it is new, or had no limit
		b.level = size
	}
	if passed := now.Sub(b.at); !b.at.IsZero() && passed > 0 {
		b.level += size * passed.Minutes()
	}
	b.size, b.at, b.level = size, now, min(b.level, size)
}

// has reports whether n may be taken. More than fit may be taken from a full bucket, or never.
func (b *bucket) has(n int) bool { return b.size == 0 || b.level >= min(float64(n), b.size) }

// take takes n; a negative number gives them back.
func (b *bucket) take(n int) {
	if b.size > 0 {
		b.level = min(b.level-float64(n), b.size)
	}
}

// until is after how many seconds n may be taken.
func (b *bucket) until(n int) float64 {
	if b.size == 0 {
		return 0
	}
	return max(0, min(float64(n), b.size)-b.level) / b.size * 60
}

// full reports whether the bucket says no more than a new one.
func (b *bucket) full() bool { return b.level >= b.size }

// mean is an average in which the last samples weigh most.
type mean struct {
	value   float64
	samples int
}

// meanOf is about how many samples count.
const meanOf = 32

func (m *mean) add(sample float64) {
	m.samples = min(m.samples+1, meanOf)
	m.value += (sample - m.value) / float64(m.samples)
}

package fleet

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestLeaseEndsAfterReturn: an instance that comes back about when its lease ends is followed before and after that, and the router knows
// all of it in the end. What it publishes between counts for nobody else: others may have its number in the index by then.
func TestLeaseEndsAfterReturn(t *testing.T) {
	many := small()
	many.Seed, many.Instances, many.Blocks, many.Rate = 10, 100, 100*600, 2
	for _, o := range []Options{small(), many} {
		o.Fault = RacksFail
		for outage := leaseTime - 2*registerEvery; outage <= leaseTime; outage += 1500 * time.Millisecond {
			if o.Instances == many.Instances && outage > leaseTime-registerEvery {
				continue // their traces would be long
			}
			o.Requests = int(5 * outage.Seconds() * o.Rate * float64(o.Instances))
			r := run(t, o)
			require.Empty(t, r.Violations, "%d instances, racks that are away for %v", o.Instances, outage)
		}
	}
}

package fleet

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestLeaseEndsAfterReturn: an instance that comes back about when its lease ends is followed before and after that, and the router knows
// all of it in the end.
func TestLeaseEndsAfterReturn(t *testing.T) {
	for outage := leaseTime - 2*registerEvery; outage <= leaseTime; outage += time.Second {
		o := small()
		o.Fault = RacksFail
		o.Requests = int(5 * outage.Seconds() * o.Rate * float64(o.Instances))
		r := run(t, o)
		require.Empty(t, r.Violations, "racks that are away for %v", outage)
	}
}

package placement

import (
	"os"
	"reflect"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// seeds is how many worlds a test plays.
func seeds(short, full int) uint64 {
	if os.Getenv("KVPORT_SOAK") != "" {
		return uint64(full)
	}
	return uint64(short)
}

// play plays worlds and returns what happened in all of them.
func play(t *testing.T, o Options, n uint64) (all Stats) {
	t.Helper()
	sum := reflect.ValueOf(&all).Elem()
	for seed := range n {
		o.Seed = seed
		stats, err := Play(o)
		require.NoError(t, err)
		one := reflect.ValueOf(stats)
		for i := range sum.NumField() {
			sum.Field(i).SetInt(sum.Field(i).Int() + one.Field(i).Int())
		}
	}
	t.Logf("%d worlds: %+v", n, all)
	return all
}

// happened checks that no counter but the named ones is zero.
func happened(t *testing.T, s Stats, except ...string) {
	t.Helper()
	v := reflect.ValueOf(s)
	for i := range v.NumField() {
		if name := v.Type().Field(i).Name; !slices.Contains(except, name) {
			assert.Positive(t, v.Field(i).Int(), "%s never happened", name)
		}
	}
}

const steps = 1500

// TestSound: an honest plugin that dies at any access, replaced blocks, promotions, resets; no digest helps the readers.
func TestSound(t *testing.T) {
	s := play(t, Options{Steps: steps}, seeds(400, 40_000))
	happened(t, s, "Lies", "Digest")
}

// TestDamage: a header is damaged when the plugin dies.
func TestDamage(t *testing.T) {
	s := play(t, Options{Steps: steps, Damage: true}, seeds(200, 20_000))
	happened(t, s, "Digest")
}

// TestCareless: a plugin that ignores pins costs no reader a wrong byte.
func TestCareless(t *testing.T) {
	s := play(t, Options{Steps: steps, Careless: true}, seeds(300, 20_000))
	happened(t, s, "Lies", "Digest", "Pinned", "Refused")
}

// TestLiars: the first life writes and says anything. The host neither fails nor leaves its memory, no read accepts what
// has no digest, and the honest lives after it lose no slot and are refused nothing.
func TestLiars(t *testing.T) {
	s := play(t, Options{Steps: steps, Liar: true}, seeds(400, 40_000))
	happened(t, s)
}

// TestMutants: each is caught.
func TestMutants(t *testing.T) {
	for m := Sound + 1; m < mutants; m++ {
		t.Run(m.String(), func(t *testing.T) {
			o := Options{Steps: steps, Mutant: m, Careless: m.careless(), Damage: m == AdoptUnchecked, Liar: m == LentTwiceAccepted}
			for o.Seed = range seeds(3000, 3000) {
				if _, err := Play(o); err != nil {
					t.Log(err)
					return
				}
			}
			t.Errorf("nobody noticed it")
		})
	}
}

// TestEqualSeedsEqualWorlds: no map order, clock or address gets into a world.
func TestEqualSeedsEqualWorlds(t *testing.T) {
	for seed := range uint64(20) {
		o := Options{Seed: seed, Steps: steps, Damage: true}
		one, err := Play(o)
		require.NoError(t, err)
		two, err := Play(o)
		require.NoError(t, err)
		require.Equal(t, one, two)
	}
}

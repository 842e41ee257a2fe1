package connector

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

type plain struct{}

func (plain) Match(context.Context, []Query) ([]Match, error) { return nil, nil }
func (plain) Close() error                                    { return nil }

type resetter struct{ plain }

func (resetter) Reset(context.Context) (bool, error) { return true, nil }

// proxy has every method and supports only the capabilities in can.
type proxy struct {
	resetter
	can Capability
}

func (proxy) Plan(context.Context, *Step) (*Plan, error)      { return nil, nil }
func (proxy) Finish(context.Context, []Ended) ([]Hold, error) { return nil, nil }
func (proxy) Consumed(context.Context) ([]HoldID, error)      { return nil, nil }
func (p proxy) Capabilities() Capability                      { return p.can }

func TestCapabilitiesOf(t *testing.T) {
	require.Zero(t, CapabilitiesOf(nil))
	require.Zero(t, CapabilitiesOf(plain{}))
	require.Equal(t, CanReset, CapabilitiesOf(resetter{}))
	for c := range CanPlan | CanHold | CanReset + 1 {
		require.Equal(t, c, CapabilitiesOf(proxy{can: c}))
		require.Equal(t, c, CapabilitiesOf(&proxy{can: c}))
	}
	require.Equal(t, CanPlan, CapabilitiesOf(proxy{can: CanPlan | 1<<40}), "a claim without the method is none")
}

func TestAs(t *testing.T) {
	is := func(v any) (c Capability) {
		if _, ok := As[Planner](v); ok {
			c |= CanPlan
		}
		if _, ok := As[Holder](v); ok {
			c |= CanHold
		}
		if r, ok := As[Resetter](v); ok {
			c |= CanReset
			require.NotNil(t, r)
		} else {
			require.Nil(t, r)
		}
		return c
	}
	require.Zero(t, is(nil))
	for _, v := range []any{plain{}, resetter{}, proxy{}, proxy{can: CanHold}, &proxy{can: CanPlan | CanReset}} {
		require.Equal(t, CapabilitiesOf(v), is(v), "As and CapabilitiesOf agree")
	}
	_, ok := As[Scheduler](proxy{})
	require.True(t, ok, "what has no bit is not optional")
}

func TestCapabilityString(t *testing.T) {
	require.Empty(t, Capability(0).String())
	require.Equal(t, "plan,reset", (CanPlan | CanReset).String())
	require.Equal(t, "hold,bit40", (CanHold | 1<<40).String())
}

// Every bit has one interface and every interface one bit.
func TestOptionalTable(t *testing.T) {
	seen := Capability(0)
	for _, o := range Powers() {
		require.Equal(t, Capability(1)<<(o.Number()-1), o.Bit)
		require.Greater(t, o.Bit, seen, "in order of the bits")
		require.LessOrEqual(t, o.Interface.NumMethod(), 2)
		seen |= o.Bit
	}
}

func TestParseRole(t *testing.T) {
	for name, c := range map[string]struct {
		role         Role
		loads, saves bool
	}{"kv_producer": {RoleProducer, false, true}, "kv_consumer": {RoleConsumer, true, false}, "kv_both": {RoleBoth, true, true}} {
		r, err := ParseRole(name)
		require.NoError(t, err)
		require.Equal(t, c.role, r)
		require.Equal(t, name, r.String())
		require.Equal(t, c.loads, r.Loads())
		require.Equal(t, c.saves, r.Saves())
	}
	for _, bad := range []string{"", "both", "KV_BOTH", "role 0", "role 4"} {
		_, err := ParseRole(bad)
		require.ErrorIs(t, err, ErrIncompatible)
	}
	require.Equal(t, "role 9", Role(9).String())
	require.False(t, Role(0).Loads() || Role(0).Saves())
}

func TestScopeString(t *testing.T) {
	require.Equal(t, []string{"engine", "node", "shared", "scope 4"},
		[]string{ScopeEngine.String(), ScopeNode.String(), ScopeShared.String(), Scope(4).String()})
}

func TestErrorsUnwrap(t *testing.T) {
	block := fmt.Errorf("load: %w", &BlockError{Blocks: []BlockID{4, 2}, Err: ErrCorrupt})
	require.ErrorIs(t, block, ErrCorrupt)
	var blocks *BlockError
	require.ErrorAs(t, block, &blocks)
	require.Equal(t, []BlockID{4, 2}, blocks.Blocks)
	require.EqualError(t, block, "load: 2 blocks [4 2]: corrupt")

	item := &ItemError{Items: []int{1}, Err: ErrBusy}
	require.ErrorIs(t, item, ErrBusy)
	require.EqualError(t, item, "1 items [1]: busy, try again")
	all := []error{ErrBusy, ErrGone, ErrIncompatible, ErrCorrupt, ErrDeclined}
	for i, a := range all {
		for j, b := range all {
			require.Equal(t, i == j, errors.Is(a, b))
		}
	}
}

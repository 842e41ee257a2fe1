package connector

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEnvValidate(t *testing.T) {
	valid := func() Env {
		return Env{Engine: "e", Role: RoleBoth, World: 2, Rank: 1, Layout: validLayout()}
	}
	env := valid()
	require.NoError(t, env.Validate())
	for name, c := range map[string]struct {
		change func(*Env)
		want   string
	}{
		"engine":      {func(e *Env) { e.Engine = "" }, "engine is empty"},
		"role":        {func(e *Env) { e.Role = 0 }, "role is 0"},
		"late role":   {func(e *Env) { e.Role = RoleBoth + 1 }, "role is 4"},
		"world":       {func(e *Env) { e.World, e.Rank = 0, 0 }, "rank 0 of 0"},
		"rank":        {func(e *Env) { e.Rank = 2 }, "rank 2 of 2"},
		"negative":    {func(e *Env) { e.Rank = -1 }, "rank -1 of 2"},
		"layout":      {func(e *Env) { e.Layout.Groups = nil }, "0 groups"},
		"far segment": {func(e *Env) { e.Layout.Segments[0].Offset = 1 << 62; e.Layout.Segments[0].BlockStride = 1 << 62 }, "segments[0]"},
	} {
		env := valid()
		c.change(&env)
		err := env.Validate()
		require.ErrorIs(t, err, ErrIncompatible, name)
		require.ErrorContains(t, err, c.want, name)
	}
}

package sdk

import (
	"context"
	"encoding/json"

	"github.com/kvport/kvport/connector"
)

// FromSides makes a connector of a complete Scheduler and Worker. This is the level with the most control,
// for backends that do not fit [FromStore], [FromBuffer] or [FromPipe]. C is the struct of the config, see
// [DecodeConfig].
//
// scheduler and worker each open a side, in any order and as often as the host asks (rule OPEN-01). They
// may be the same function if one type implements both sides. Env has already been checked. The sides must
// have the optional interfaces that d.Capabilities names.
func FromSides[C any, S connector.Scheduler, W connector.Worker](d Definition,
	scheduler func(ctx context.Context, env connector.Env, config C) (S, error),
	worker func(ctx context.Context, env connector.Env, config C) (W, error),
) connector.Plugin {
	d.Capabilities = d.powers()
	return connector.Plugin{
		Name: d.Name, Aliases: d.Aliases, Version: d.Version, Environment: d.Environment, Needs: d.Needs, Schema: SchemaOf[C](),
		Capabilities: d.Capabilities,
		Describe: func(_ context.Context, raw json.RawMessage) (connector.Info, error) {
			_, err := DecodeConfig[C](raw)
			return connector.Info{Name: d.Name, Scope: d.Scope, Groups: d.Groups, Capabilities: d.Capabilities, Stats: d.Stats}, err
		},
		Scheduler: func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Scheduler, error) {
			side, err := openSide(ctx, env, raw, scheduler)
			if err != nil {
				return nil, err
			}
			return side, nil
		},
		Worker: func(ctx context.Context, env connector.Env, raw json.RawMessage) (connector.Worker, error) {
			side, err := openSide(ctx, env, raw, worker)
			if err != nil {
				return nil, err
			}
			return side, nil
		},
	}
}

func openSide[C, S any](ctx context.Context, env connector.Env, raw json.RawMessage, open func(context.Context, connector.Env, C) (S, error)) (side S, err error) {
	config, err := DecodeConfig[C](raw)
	if err == nil {
		err = env.Validate()
	}
	if err != nil {
		return side, err
	}
	return open(ctx, env, config)
}

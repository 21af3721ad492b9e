"""From the graph that Dynamo hands over to one flat aten program with named inputs."""

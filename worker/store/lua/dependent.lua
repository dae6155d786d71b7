-- What queueing a dependent needs of its hash: its queue, and two flags.
-- Returns them, '' for one that is missing; false for a job that is gone or has no such queue: names are short.
local job, found = 'rq:job:' .. args.id, {}
for i, name in ipairs({'origin', 'enqueue_at_front', 'allow_dependency_failures'}) do
  if call('HSTRLEN', job, name) > 1024 then return false end
  found[i] = call('HGET', job, name) or ''
end
return found[1] ~= '' and found
